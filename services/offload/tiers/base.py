"""SEAM: a place pages can be read from and written to, one kind per file.

A tier knows whether handles still name what it holds (`check`, raising Stale; called before and after every copy, so
`read` and `write` need not), and moves runs of whole pages between itself and host memory. Calls come from mover
threads; two copies never have the same target page. Anything that fails raises: the caller's fallback is to recompute.

`read` and `write` may return before the bytes have moved: until `finish` returns, both sides must stay as they are, and
nothing is certain. Kinds that are memory can do more between each other than this; `mover.py` knows which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np

from shared.handles import BlockTable, TailHandle
from shared.pool import Pool

P = TypeVar("P", bound=Pool)


class Tier(ABC):
    page_bytes: int

    @abstractmethod
    def check(self, table: BlockTable, tail: TailHandle | None) -> None:
        """Raises Stale unless every handle still names its tenant."""

    @abstractmethod
    def read(self, first: int, into: np.ndarray) -> None:
        """Pages `first …` → `into`, uint8 [pages, page_bytes]."""

    @abstractmethod
    def write(self, first: int, pages: np.ndarray) -> None:
        """`pages`, uint8 [pages, page_bytes] → pages `first …`."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when everything begun by the calling thread is done, or raises if that cannot be known."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what it holds. Nothing is under way and nothing will be begun."""


class PoolTier(Tier, Generic[P]):
    """A pool of this node, in one incarnation: it has tails, too. Owns the mapping that it is given."""

    def __init__(self, pool: P) -> None:
        self._pool, self.epoch = pool, pool.epoch
        self.page_bytes, self.tail_bytes = pool.pages.shape[1], pool.tails.shape[1]

    @property
    def ended(self) -> bool:
        """Whether the incarnation is over: its handles are all stale, and its successor may want the memory."""
        return self._pool.live_epoch() != self.epoch

    def check(self, table: BlockTable, tail: TailHandle | None) -> None:
        self._pool.check(table, tail=tail)

    @abstractmethod
    def read_tail(self, slot: int, into: np.ndarray) -> None:
        """A tail → `into`, uint8 [tail_bytes]; as `read`."""

    @abstractmethod
    def write_tail(self, slot: int, tail: np.ndarray) -> None:
        """`tail`, uint8 [tail_bytes] → a tail; as `write`."""
