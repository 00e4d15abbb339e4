"""What the block manager has the offload actor copy."""

from __future__ import annotations

from shared.handles import BlockTable, TailHandle
from shared.messages.base import Message


class Copy(Message):
    """`offload.copy`: bytes of whole pages (and of a tail) from one pool to another. Answers `Copied`.

    The mover checks epoch and generations of both sides before and after, and answers Stale if one changed.
    """

    transfer: int
    source: BlockTable
    target: BlockTable
    source_tail: TailHandle | None = None
    target_tail: TailHandle | None = None


class Copied(Message):
    transfer: int
    pages: int
    bytes: int
    seconds: float


class Settle(Message):
    """`offload.settle.<instance>`: no answer to a copy came; are its bytes still being written? Answers `Settled`."""

    transfer: int


class Settled(Message):
    transfer: int
    running: bool
