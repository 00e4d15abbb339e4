"""What travels instead of tensors: handles of pages and tails, and the tables that hold many of them.

A handle is only as good as its `epoch` (incarnation of the pool) and `generation` (tenancy of the slot). Whoever
dereferences one checks both before and after use (`shared.pool.Pool.check`); a mismatch is `errors.Stale`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

U32 = np.dtype("<u4")


class BlockHandle(NamedTuple):
    """One page of one pool."""

    pool: str
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants of a handle
    generation: int


class TailHandle(BaseModel):
    """One tail slot; `tokens` of it are written. Slots share the generation array with pages, behind them."""

    model_config = ConfigDict(frozen=True)

    slot: int = Field(ge=0)
    generation: int = Field(ge=0)
    tokens: int = Field(default=0, ge=0)


def pack_u32(values: object) -> bytes:
    """Little-endian u32 bytes of any sequence of integers (token ids, page indices, generations)."""
    return np.ascontiguousarray(values, dtype=U32).tobytes()


def unpack_u32(packed: bytes) -> np.ndarray:
    """The read-only u32 array behind `pack_u32`'s bytes."""
    return np.frombuffer(packed, dtype=U32)


def _whole_u32(packed: bytes) -> bytes:
    if len(packed) % 4:
        raise ValueError("a packed u32 array needs a length that is a multiple of 4")
    return packed


def as_tuple(value: object) -> object:
    """A list as a tuple: the wire has no tuples, and its types are checked strictly."""
    return tuple(value) if isinstance(value, list) else value


PackedU32 = Annotated[bytes, AfterValidator(_whole_u32)]


class BlockTable(BaseModel):
    """The pages of one sequence in order of position, as packed arrays of equal length."""

    model_config = ConfigDict(frozen=True)

    pool: str
    epoch: int
    indices: PackedU32 = b""
    generations: PackedU32 = b""

    def __len__(self) -> int:
        return len(self.indices) // 4

    def handles(self) -> list[BlockHandle]:
        """The same pages one by one; for logs and tests, not for hot paths."""
        pairs = zip(unpack_u32(self.indices).tolist(), unpack_u32(self.generations).tolist(), strict=True)
        return [BlockHandle(self.pool, self.epoch, index, generation) for index, generation in pairs]

    def extended(self, more: BlockTable) -> BlockTable:
        """This table followed by `more` pages of the same incarnation of the same pool."""
        if (self.pool, self.epoch) != (more.pool, more.epoch):
            raise ValueError(f"cannot join tables of {self.pool}/{self.epoch} and {more.pool}/{more.epoch}")
        return self.model_copy(
            update={"indices": self.indices + more.indices, "generations": self.generations + more.generations}
        )


class Layout(BaseModel):
    """What two actors must agree on before they exchange handles. Compared whole; sent once per pool."""

    model_config = ConfigDict(frozen=True)

    k_format: str
    v_format: str
    skip_layers: Annotated[tuple[int, ...], BeforeValidator(as_tuple)] = ()
    tail_format: str = Field(description="compute dtype of tails and skipped layers: bf16, fp16 or fp32")
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    page_bytes: int
    tail_bytes: int
    fingerprint: str = Field(description="hex; model, tokenizer, rope and everything above; seeds the prefix chain")
