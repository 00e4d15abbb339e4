"""The few calls of the CUDA driver that a pool needs, through ctypes: no torch, no toolkit, only the driver's library.

All calls work in the device's primary context, which torch uses too, so that pointers mean the same to both.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final, NamedTuple

from shared.errors import Misconfigured

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16
_LIBRARIES: Final = ("libcuda.so.1", "libcuda.so")
_LAZY_PEER_ACCESS: Final = 1


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class MemoryInfo(NamedTuple):
    """Bytes of one device."""

    free: int
    total: int


@cache
def _driver() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(pointer), size)
        library.cuMemFree_v2.argtypes = (pointer,)
        library.cuMemsetD8_v2.argtypes = (pointer, ctypes.c_ubyte, size)
        library.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, pointer, size)
        library.cuMemcpyHtoD_v2.argtypes = (pointer, ctypes.c_void_p, size)
        library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(IpcHandle), pointer)
        library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(pointer), IpcHandle, ctypes.c_uint)
        library.cuIpcCloseMemHandle.argtypes = (pointer,)
        library.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
        if code := library.cuInit(0):
            raise Misconfigured(f"the NVIDIA driver cannot start ({_name(library, code)}); see `nvidia-smi`")
        return library
    raise Misconfigured(
        f"no NVIDIA driver on this machine ({_LIBRARIES[0]} not found): pools named cuda<N> need one; use cpu0"
    )


def _name(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    return (text.value or b"unknown error").decode() + f", {code}"


class Device:
    """One GPU, by its index among those visible to this process. Raises Misconfigured where it cannot be used."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._cuda = _driver()
        count = ctypes.c_int()
        self._check(self._cuda.cuDeviceGetCount(ctypes.byref(count)), "count the GPUs")
        if not 0 <= index < count.value:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
            raise Misconfigured(f"there is no GPU {index}: {count.value} visible (CUDA_VISIBLE_DEVICES: {visible})")
        self._device = ctypes.c_int()
        self._check(self._cuda.cuDeviceGet(ctypes.byref(self._device), index), "find the GPU")
        self._context = ctypes.c_void_p()
        made = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._device)
        self._check(made, "make a context on the GPU")

    @classmethod
    def by_uuid(cls, uuid: bytes) -> Device:
        """The GPU of this `uuid`, whatever index it has here. Raises Misconfigured if it is not visible."""
        library = _driver()
        count, device = ctypes.c_int(), ctypes.c_int()
        library.cuDeviceGetCount(ctypes.byref(count))
        for index in range(count.value):
            found = ctypes.create_string_buffer(UUID_BYTES)
            library.cuDeviceGet(ctypes.byref(device), index)
            if library.cuDeviceGetUuid(found, device) == 0 and found.raw == uuid:
                return cls(index)
        raise Misconfigured("the pool is on a GPU this process cannot see; give both the same CUDA_VISIBLE_DEVICES")

    @property
    def uuid(self) -> bytes:
        found = ctypes.create_string_buffer(UUID_BYTES)
        self._check(self._cuda.cuDeviceGetUuid(found, self._device), "read the GPU's UUID")
        return found.raw

    def memory(self) -> MemoryInfo:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._enter()
        self._check(self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "read the GPU's memory")
        return MemoryInfo(free.value, total.value)

    def allocate(self, size: int) -> int:
        """Zeroed memory as a device pointer. Raises Misconfigured if there is not enough."""
        pointer = ctypes.c_uint64()
        self._enter()
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(pointer), size), f"allocate {size / 2**20:.0f} MiB")
        self._check(self._cuda.cuMemsetD8_v2(pointer, 0, size), "clear the memory")
        self._check(self._cuda.cuCtxSynchronize(), "clear the memory")
        return pointer.value

    def free(self, pointer: int) -> None:
        self._enter()
        self._check(self._cuda.cuMemFree_v2(pointer), "free memory")

    def export(self, pointer: int) -> bytes:
        """The handle other processes open."""
        handle = IpcHandle()
        self._enter()
        self._check(self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), pointer), "export memory to other processes")
        return bytes(memoryview(handle))

    def open(self, handle: bytes) -> int:
        """The exported memory as a pointer of this process; never in the process that exported it."""
        pointer = ctypes.c_uint64()
        self._enter()
        opened = self._cuda.cuIpcOpenMemHandle_v2(
            ctypes.byref(pointer), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        )
        self._check(opened, "open the block manager's memory (containers need a common --ipc and --pid)")
        return pointer.value

    def close(self, pointer: int) -> None:
        self._enter()
        self._check(self._cuda.cuIpcCloseMemHandle(pointer), "let the block manager's memory go")

    def read(self, pointer: int, size: int) -> bytes:
        into = ctypes.create_string_buffer(size)
        self._enter()
        self._check(self._cuda.cuMemcpyDtoH_v2(into, pointer, size), "copy from the GPU")
        return into.raw

    def write(self, pointer: int, content: bytes) -> None:
        self._enter()
        self._check(self._cuda.cuMemcpyHtoD_v2(pointer, content, len(content)), "copy to the GPU")

    def _enter(self) -> None:
        """The context is current per thread, and calls come from several."""
        self._check(self._cuda.cuCtxSetCurrent(self._context), "use the GPU")

    def _check(self, code: int, doing: str) -> None:
        if code:
            raise Misconfigured(f"GPU {self.index}: cannot {doing} ({_name(self._cuda, code)})")
