"""A pool in shared host memory as a tier. Copies are done when they return."""

from __future__ import annotations

import numpy as np

from services.offload.tiers.base import PoolTier
from shared.pool import Pool
from shared.pool.cuda_driver import Device


class MemoryTier(PoolTier[Pool]):
    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._locked: dict[int, Device] | None = None

    def read(self, first: int, into: np.ndarray) -> None:
        np.copyto(into, self.window(first, len(into)))

    def write(self, first: int, pages: np.ndarray) -> None:
        np.copyto(self.window(first, len(pages)), pages)

    def read_tail(self, slot: int, into: np.ndarray) -> None:
        np.copyto(into, self.tail(slot))

    def write_tail(self, slot: int, tail: np.ndarray) -> None:
        np.copyto(self.tail(slot), tail)

    def finish(self) -> None:
        return

    def close(self) -> None:
        for address, device in (self._locked or {}).items():
            device.page_unlock(address)
        self._locked = None
        self._pool.close()

    def window(self, first: int, count: int) -> np.ndarray:
        """Pages `first …` in place, uint8 [count, page_bytes]."""
        return self._pool.pages[first : first + count]

    def tail(self, slot: int) -> np.ndarray:
        """A tail in place, uint8 [tail_bytes]."""
        row: np.ndarray = self._pool.tails[slot]
        return row

    def page_lock(self, device: Device) -> bool:
        """Makes copies between this pool and GPUs faster, if the driver can. Tried once; may take a second."""
        if self._locked is None:
            self._locked = {}
            for memory in (self._pool.pages, self._pool.tails):
                if device.page_lock(memory.ctypes.data, memory.nbytes):
                    self._locked[memory.ctypes.data] = device
        return len(self._locked) == 2
