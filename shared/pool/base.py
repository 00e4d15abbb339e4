"""SEAM: kinds of pool memory, one file per kind, named as in `PoolDescription.kind`.

A kind's module has `attach(description) -> Pool`. What holds for every kind:

- `pages` is uint8 [blocks, page_bytes], `tails` uint8 [tails, tail_bytes], mapped memory shared by all processes (numpy
  arrays in host memory, objects with `__cuda_array_interface__` on a GPU);
- `generations` is uint32 [blocks + tails], written by the block manager alone, *before* it grants a slot again;
- `live_epoch()` reads the incarnation from shared memory; once it differs from `epoch`, nothing here may be trusted;
- mapped memory stays readable until `close()`, even if the owner has died: a reader can be stale, it cannot crash.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from shared.errors import Stale
from shared.handles import BlockTable, TailHandle, unpack_u32


class Pool(ABC):
    """Mapped pages and tails of one incarnation of one pool."""

    name: str
    path: Path
    epoch: int
    blocks: int
    slots: int
    pages: np.ndarray
    tails: np.ndarray
    generations: np.ndarray

    @abstractmethod
    def live_epoch(self) -> int:
        """The incarnation shown in shared memory now; 0 after the owner has given the memory up."""

    @abstractmethod
    def close(self) -> None:
        """Drops the mapping. The arrays must not be used afterwards; closing twice is harmless."""

    def check(
        self, table: BlockTable | np.ndarray, generations: np.ndarray | None = None, tail: TailHandle | None = None
    ) -> None:
        """Raises Stale unless every page (and the tail) still has the tenant the handles name.

        Call it before **and after** using the bytes, and throw the result away if the second call raises. `table` is a
        table, or an index array with its `generations`.
        """
        if isinstance(table, BlockTable):
            if (table.pool, table.epoch) != (self.name, self.epoch):
                raise Stale(f"handles of {table.pool}/{table.epoch} are not of pool {self.name}/{self.epoch}")
            indices, generations = unpack_u32(table.indices), unpack_u32(table.generations)
        else:
            indices = table
        if generations is None or len(indices) != len(generations):
            raise Stale("a table needs one generation per page")
        if self.live_epoch() != self.epoch:
            raise Stale(f"pool {self.name} has been created anew; recompute")
        if len(indices):
            if int(indices.max()) >= self.blocks:
                raise Stale(f"a handle points outside pool {self.name}")
            if not np.array_equal(self.generations[indices], generations):
                raise Stale(f"pages of pool {self.name} have a new tenant; recompute")
        if tail is None:
            return
        if tail.slot >= self.slots or int(self.generations[self.blocks + tail.slot]) != tail.generation:
            raise Stale(f"tail {tail.slot} of pool {self.name} has a new tenant; recompute")
