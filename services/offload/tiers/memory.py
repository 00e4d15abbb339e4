"""A pool of this node as a tier."""

from __future__ import annotations

import numpy as np

from services.offload.tiers.base import Tier
from shared.handles import BlockTable, TailHandle
from shared.pool import Pool


class MemoryTier(Tier):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def check(self, table: BlockTable, tail: TailHandle | None) -> None:
        self._pool.check(table, tail=tail)

    def read(self, first: int, into: np.ndarray) -> None:
        np.copyto(into, self._pool.pages[first : first + len(into)])

    def write(self, first: int, pages: np.ndarray) -> None:
        np.copyto(self._pool.pages[first : first + len(pages)], pages)

    def window(self, first: int, count: int) -> np.ndarray:
        return self._pool.pages[first : first + count]

    def tail(self, slot: int) -> np.ndarray:
        row: np.ndarray = self._pool.tails[slot]
        return row
