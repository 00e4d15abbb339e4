"""The few calls of the CUDA driver that pools and copies need, through ctypes: no torch, no toolkit, only the driver.

All calls work in the device's primary context, which torch uses too, so that pointers mean the same to both. Names with
`_v2` are those the header's macros stand for (cuda.h).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final, NamedTuple

from shared.errors import Internal, KvrelayError, Misconfigured

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16
GRANULE: Final = 2 << 20
"""Smaller allocations share a block, and its handle opens all of it."""
_LIBRARIES: Final = ("libcuda.so.1", "libcuda.so")
_LAZY_PEER_ACCESS: Final = 1
_PINNED_FOR_ALL: Final = 1
_PEER_ACCESS_ENABLED: Final = 704


class DeviceFailed(Internal):
    """A GPU did not do what it was asked. What runs on it is unknown until this process has ended."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class MemoryInfo(NamedTuple):
    """Bytes of one device."""

    free: int
    total: int


_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (c_uint64, c_void_p, c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_char * UUID_BYTES, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}


@cache
def _driver() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        for call, argument_types in _PROTOTYPES.items():
            if not hasattr(library, call):
                raise Misconfigured(f"the NVIDIA driver is too old: it has no {call}")
            getattr(library, call).argtypes = argument_types
        if code := library.cuInit(0):
            raise Misconfigured(f"the NVIDIA driver cannot start ({_name(library, code)}); see `nvidia-smi`")
        return library
    raise Misconfigured(
        f"no NVIDIA driver on this machine ({_LIBRARIES[0]} not found): pools named cuda<N> need one; use cpu0"
    )


def _name(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(c_int(code), ctypes.byref(text))
    return (text.value or b"unknown error").decode() + f", {code}"


class Device:
    """One GPU, by its index among those visible to this process. Raises Misconfigured where it cannot be used."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._cuda = _driver()
        count, device, self._context = c_int(), c_int(), c_void_p()
        self._check(self._cuda.cuDeviceGetCount(ctypes.byref(count)), "count the GPUs")
        if not 0 <= index < count.value:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
            raise Misconfigured(f"there is no GPU {index}: {count.value} visible (CUDA_VISIBLE_DEVICES: {visible})")
        self._check(self._cuda.cuDeviceGet(ctypes.byref(device), index), "find the GPU")
        self._device = device.value
        made = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._device)
        self._check(made, "make a context on the GPU")

    @classmethod
    def by_uuid(cls, uuid: bytes) -> Device:
        """The GPU (or MIG instance) of this `uuid`, whatever index it has here. Misconfigured if it is not visible."""
        library = _driver()
        count, device, found = c_int(), c_int(), (c_char * UUID_BYTES)()
        library.cuDeviceGetCount(ctypes.byref(count))
        for index in range(count.value):
            library.cuDeviceGet(ctypes.byref(device), index)
            if library.cuDeviceGetUuid_v2(found, device) == 0 and found.raw == uuid:
                return cls(index)
        raise Misconfigured("the pool is on a GPU this process cannot see; give both the same CUDA_VISIBLE_DEVICES")

    @property
    def uuid(self) -> bytes:
        found = (c_char * UUID_BYTES)()
        self._check(self._cuda.cuDeviceGetUuid_v2(found, self._device), "read the GPU's UUID")
        return found.raw

    @property
    def context(self) -> c_void_p:
        return self._context

    def memory(self) -> MemoryInfo:
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", "read the GPU's memory", ctypes.byref(free), ctypes.byref(total))
        return MemoryInfo(free.value, total.value)

    def allocate(self, size: int) -> int:
        """Zeroed memory as a device pointer. Raises Misconfigured if there is not enough."""
        pointer, whole = c_uint64(), -(-size // GRANULE) * GRANULE
        doing = f"allocate {size / 2**20:.0f} MiB"
        self.call("cuMemAlloc_v2", doing, ctypes.byref(pointer), whole, error=Misconfigured)
        self.call("cuMemsetD8_v2", "clear the memory", pointer, 0, size)
        self.call("cuCtxSynchronize", "clear the memory")
        return pointer.value

    def free(self, pointer: int) -> None:
        self.call("cuMemFree_v2", "free memory", pointer)

    def export(self, pointer: int) -> bytes:
        """The handle other processes open. Raises Misconfigured where the driver cannot share memory."""
        handle = IpcHandle()
        doing = "export memory to other processes"
        self.call("cuIpcGetMemHandle", doing, ctypes.byref(handle), pointer, error=Misconfigured)
        return bytes(memoryview(handle))

    def open(self, handle: bytes) -> int:
        """The exported memory as a pointer of this process; once in a process, and never in the one that exported it.

        Raises Misconfigured if it cannot be had, as when the exporter has ended.
        """
        pointer = c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2", "open the block manager's memory (containers need a common --ipc and --pid)",
            ctypes.byref(pointer), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS, error=Misconfigured,
        )  # fmt: skip
        return pointer.value

    def close(self, pointer: int) -> None:
        self.call("cuIpcCloseMemHandle", "let the block manager's memory go", pointer)

    def read(self, pointer: int, size: int) -> bytes:
        into = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", "copy from the GPU", into, pointer, size)
        return into.raw

    def write(self, pointer: int, content: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", "copy to the GPU", pointer, content, len(content))

    def page_lock(self, address: int, size: int) -> bool:
        """Whether host memory is page-locked now, for all GPUs, which makes copies faster. Undo it before unmapping."""
        self._enter()
        return bool(self._cuda.cuMemHostRegister_v2(address, size, _PINNED_FOR_ALL) == 0)

    def page_unlock(self, address: int) -> None:
        self.call("cuMemHostUnregister", "let host memory go", address)

    def reach(self, other: Device) -> bool:
        """Whether copies to `other` go straight, not through host memory."""
        can = c_int()
        asked = self._cuda.cuDeviceCanAccessPeer(ctypes.byref(can), self._device, other._device)
        if asked or not can.value:
            return False
        self._enter()
        return self._cuda.cuCtxEnablePeerAccess(other._context, 0) in (0, _PEER_ACCESS_ENABLED)

    def call(self, name: str, doing: str, *args: Any, error: type[KvrelayError] = DeviceFailed) -> None:
        """One call in this device's context, which is current per thread; raises `error` unless it succeeds."""
        self._enter()
        self._check(getattr(self._cuda, name)(*args), doing, error)

    def _enter(self) -> None:
        self._check(self._cuda.cuCtxSetCurrent(self._context), "use the GPU")

    def _check(self, code: int, doing: str, error: type[KvrelayError] = Misconfigured) -> None:
        if code:
            raise error(f"GPU {self.index}: cannot {doing} ({_name(self._cuda, code)})")
