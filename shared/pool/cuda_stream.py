"""Copies of a GPU on a stream of their own, beside whatever else it does."""

from __future__ import annotations

import ctypes
from typing import Final

from shared.pool.cuda_driver import Device

_NON_BLOCKING: Final = 1
_SLEEP_AND_NO_TIMES: Final = 1 | 2
"""CU_EVENT_BLOCKING_SYNC: whoever waits sleeps, as others need the core; CU_EVENT_DISABLE_TIMING."""


class Stream:
    """Copies begin in order and are done when `wait` returns, not before; until then both sides must stay as they are.

    For one thread at a time. Everything raises DeviceFailed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        self._reached: set[int] = set()
        device.call("cuStreamCreate", "make a stream", ctypes.byref(self._stream), _NON_BLOCKING)
        device.call("cuEventCreate", "make an event", ctypes.byref(self._event), _SLEEP_AND_NO_TIMES)

    def to_host(self, address: int, pointer: int, size: int) -> None:
        """`size` bytes at `pointer` on this GPU to host memory at `address`."""
        self._device.call("cuMemcpyDtoHAsync_v2", "copy to host memory", address, pointer, size, self._stream)

    def from_host(self, pointer: int, address: int, size: int) -> None:
        """`size` bytes of host memory at `address` to `pointer` on this GPU."""
        self._device.call("cuMemcpyHtoDAsync_v2", "copy from host memory", pointer, address, size, self._stream)

    def to(self, target: Device, to: int, pointer: int, size: int) -> None:
        """`size` bytes at `pointer` on this GPU to `to` on `target`, which may be this GPU."""
        if target.index == self._device.index:
            self._device.call("cuMemcpyDtoDAsync_v2", "copy", to, pointer, size, self._stream)
            return
        if target.index not in self._reached:
            self._reached.add(target.index)
            self._device.reach(target)
        self._device.call(
            "cuMemcpyPeerAsync", f"copy to GPU {target.index}",
            to, target.context, pointer, self._device.context, size, self._stream,
        )  # fmt: skip

    def wait(self) -> None:
        """Returns when every copy begun so far is done."""
        self._device.call("cuEventRecord", "mark the end of copies", self._event, self._stream)
        self._device.call("cuEventSynchronize", "finish copies", self._event)

    def close(self) -> None:
        """Call it when nothing is under way."""
        self._device.call("cuEventDestroy_v2", "let an event go", self._event)
        self._device.call("cuStreamDestroy_v2", "let a stream go", self._stream)
