"""A pool in the memory of a GPU as a tier. Copies run on a stream of its own and are done when `finish` returns."""

from __future__ import annotations

import numpy as np

from services.offload.tiers.base import PoolTier
from shared.pool.cuda_ipc import CudaPool
from shared.pool.cuda_stream import Stream


class CudaTier(PoolTier[CudaPool]):
    def __init__(self, pool: CudaPool) -> None:
        super().__init__(pool)
        self.device = pool.device
        self._stream = Stream(pool.device)

    def read(self, first: int, into: np.ndarray) -> None:
        self._stream.to_host(into.ctypes.data, self.page(first), into.nbytes)

    def write(self, first: int, pages: np.ndarray) -> None:
        self._stream.from_host(self.page(first), pages.ctypes.data, pages.nbytes)

    def read_tail(self, slot: int, into: np.ndarray) -> None:
        self._stream.to_host(into.ctypes.data, self.tail(slot), into.nbytes)

    def write_tail(self, slot: int, tail: np.ndarray) -> None:
        self._stream.from_host(self.tail(slot), tail.ctypes.data, tail.nbytes)

    def finish(self) -> None:
        self._stream.wait()

    def close(self) -> None:
        self._stream.close()
        self._pool.close()

    def page(self, index: int) -> int:
        """Where a page is, as a device pointer."""
        return int(self._pool.pages.pointer) + index * self.page_bytes

    def tail(self, slot: int) -> int:
        """Where a tail is, as a device pointer."""
        return int(self._pool.tails.pointer) + slot * self.tail_bytes

    def send(self, first: int, target: CudaTier, to: int, count: int) -> None:
        """Pages `first …` to pages `to …` of another pool, on this GPU or another one; `finish` this tier."""
        self._stream.to(target.device, target.page(to), self.page(first), count * self.page_bytes)

    def send_tail(self, slot: int, target: CudaTier, to: int) -> None:
        """As `send`, for a tail."""
        self._stream.to(target.device, target.tail(to), self.tail(slot), self.tail_bytes)
