"""Shared memory in pages of 2 MiB, where Linux grants them (6.1 and later, on tmpfs, no privilege or setting needed).

Decode reads pages of the cache at random. With 4 KiB pages that is a TLB miss every 4 KiB, which costs a third of the
memory bandwidth. `fill` puts a new file into huge pages, `map_file` maps it so that page tables can show them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from typing import Final

import numpy as np

HUGE: Final = 2 << 20
STEP: Final = 128 << 20
PATIENCE_S: Final = 2.0
GIB_S: Final = 2.5
"""What a GiB may take beyond that. First use of a virtual machine's memory, whose host has to find it, takes 1 to 2 s,
in pages of any size; a machine that has to make room for huge pages takes more, and then gives ordinary ones."""
LONGEST_S: Final = 10.0
MADV_COLLAPSE: Final = 25
PROT_NONE: Final = 0
MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def map_file(descriptor: int, size: int) -> np.ndarray:
    """uint8 [size]: the file's first bytes, shared and writable, from a multiple of 2 MiB on.

    The mapping keeps the memory without the descriptor, and goes with the last array that refers to it. Raises OSError.
    """
    room = _mmap(None, size + HUGE, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        start = -(-room // HUGE) * HUGE
        _mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(room, size + HUGE)
        raise
    memory = (ctypes.c_uint8 * size).from_address(start)
    # not at exit: threads may still read then
    weakref.finalize(memory, _libc.munmap, room, size + HUGE).atexit = False
    return np.ctypeslib.as_array(memory)


def fill(descriptor: int, size: int) -> None:
    """Gives a new, empty file of `size` bytes its memory in huge pages, zeroed, as far as there are any.

    What it leaves out is still a hole afterwards. Raises OSError if the file system has no room.
    """
    whole, started = map_file(descriptor, size), time.monotonic()
    at, step = 0, HUGE  # the first one shows whether this can be had at all
    while step := min(step, (size - at) // HUGE * HUGE):
        if time.monotonic() - started > min(PATIENCE_S + GIB_S * at / 2**30, LONGEST_S):
            return
        for place in range(at, at + step, HUGE):
            os.pwrite(descriptor, b"\0", place)  # what is entirely a hole is not collapsed
        if _libc.madvise(whole.ctypes.data + at, step, MADV_COLLAPSE) and ctypes.get_errno() != errno.EAGAIN:
            return
        at, step = at + step, STEP
