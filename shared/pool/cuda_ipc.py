"""Pools in the memory of one GPU: allocated by the block manager, mapped by workers through CUDA IPC.

Generations and epoch stay in host memory, in a file as `shm.py` makes it with pages and tails of 0 bytes, so that
checking handles costs no look at the device and a new incarnation shows in the same way. Behind its header stand the
GPU's UUID and the IPC handle. On the device: tails, then pages, each from a multiple of 4 KiB.

The driver keeps exported memory while anybody has it open, even after the owner's process has ended; freeing it by a
call while others have it open is undefined. So the owner never frees: `close` ends the epoch, the end of the process
does the rest. Readers see `Stale` and let go, and a successor waits for that (`rooms`), as it wants the same memory.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from shared.errors import Conflict, Misconfigured, Stale
from shared.handles import Layout
from shared.messages import PoolDescription
from shared.pool import shm
from shared.pool.base import Pool
from shared.pool.cuda_driver import HANDLE_BYTES, UUID_BYTES, Device
from shared.pool.shm import Geometry, ShmPool

MAGIC: Final = b"KVCUDA01"
RECORD: Final = struct.Struct(f"<8s{UUID_BYTES}s{HANDLE_BYTES}sQQ")
RECORD_AT: Final = 1024
PATIENCE_S: Final = 5.0
"""Readers notice the end of an incarnation within half a second, and then finish the step they are in."""


class DeviceBytes:
    """uint8 [rows, width] on a GPU: torch takes it without a copy by `torch.as_tensor(it, device="cuda:<index>")`.

    Keeps `owner` alive, and with it the mapping.
    """

    def __init__(self, owner: CudaPool, pointer: int, rows: int, width: int) -> None:
        self._owner = owner
        self.device_index = owner.device.index
        self.pointer, self.shape = pointer, (rows, width)
        self.__cuda_array_interface__ = {
            "shape": self.shape, "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1]


class CudaPool(Pool):
    """A pool on a GPU. `close()` unmaps a worker's copy; the owner's memory goes with its process."""

    pages: Any
    tails: Any

    def __init__(self, host: ShmPool, device: Device, pointer: int, sizes: Geometry, owner: bool) -> None:
        self.name, self.path, self.epoch = host.name, host.path, host.epoch
        self.blocks, self.slots = host.blocks, host.slots
        self.generations = host.generations
        self.device = device
        self._host, self._pointer, self._owner = host, pointer, owner
        pages_at = sizes.pages_at - sizes.tails_at
        self.tails = DeviceBytes(self, pointer, sizes.tails, sizes.tail_bytes)
        self.pages = DeviceBytes(self, pointer + pages_at, sizes.blocks, sizes.page_bytes)

    def live_epoch(self) -> int:
        return self._host.live_epoch()

    def close(self) -> None:
        if not self._pointer:
            return
        self._host.close()  # first, so that nobody trusts memory that is about to go
        pointer, self._pointer = self._pointer, 0
        if not self._owner:
            self.device.close(pointer)


def index_of(name: str) -> int | None:
    """The GPU a pool of this name is on: 0 for `cuda0` and `cuda0-decode`, None for pools in host memory."""
    digits = name.removeprefix("cuda").partition("-")[0]
    return int(digits) if name.startswith("cuda") and digits.isdecimal() else None


def rooms(names: Iterable[str], state_dir: Path | str) -> dict[str, int]:
    """Bytes each of these pools gets on its GPU unless told otherwise: what its predecessor had, if there was one, else
    its share of half of what is free, since models come on top.

    Ends predecessors whose owner has died, and waits a while for readers to let go of them.
    """
    by_device: dict[int, dict[str, int]] = {}
    for name in names:
        path = shm.pool_path(name, state_dir)
        by_device.setdefault(_required_index(name), {})[name] = _left_behind(path)
        shm.retire(path)
    found: dict[str, int] = {}
    for index, before in by_device.items():
        device, wanted, give_up = Device(index), sum(before.values()), time.monotonic() + PATIENCE_S
        while (free := device.memory().free) < wanted and time.monotonic() < give_up:
            time.sleep(0.05)
        again = free >= wanted and all(before.values())
        found |= before if again else dict.fromkeys(before, free // 2 // len(before))
    return found


def _left_behind(path: Path) -> int:
    """Bytes on the GPU of the pool whose file is at `path`; 0 if there is none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        found = os.pread(file.fileno(), RECORD.size, RECORD_AT)
        if len(found) == RECORD.size and found.startswith(MAGIC):
            return int(RECORD.unpack(found)[3])
    return 0


def _required_index(name: str) -> int:
    index = index_of(name)
    if index is None:
        raise Misconfigured(f"pool {name!r} names no GPU: call it cuda<N> or cuda<N>-<anything>")
    return index


def create(name: str, state_dir: Path | str, layout: Layout, blocks: int, tails: int) -> CudaPool:
    """Allocates a pool on the GPU its name says and owns it until the end of the process.

    Raises Misconfigured without a driver, such a GPU or enough memory on it, or if a living process owns this pool.
    """
    index = _required_index(name)
    device = Device(index)
    sizes = Geometry(blocks, tails, layout.page_bytes, layout.tail_bytes)
    size, free = sizes.total - sizes.tails_at, device.memory().free
    if size > free:
        fits = max(0, free - (sizes.pages_at - sizes.tails_at)) // layout.page_bytes
        raise Misconfigured(
            f"pool {name} needs {size / 2**20:.0f} MiB and GPU {index} has {free / 2**20:.0f} MiB free: "
            f"use fewer pages (--num-blocks-override {fits} would fit)"
        )
    host = shm.create(name, state_dir, _without_bytes(layout), blocks, tails)
    pointer = 0
    try:
        pointer = device.allocate(size)
        record = RECORD.pack(MAGIC, device.uuid, device.export(pointer), size, layout.page_bytes)
        with host.path.open("r+b") as file:
            os.pwrite(file.fileno(), record, RECORD_AT)
    except BaseException:
        host.close()
        if pointer:
            device.free(pointer)
        raise
    return CudaPool(host, device, pointer, sizes, owner=True)


def attach(description: PoolDescription) -> CudaPool:
    """Opens a pool of another process, once in a process. Stale if it or its owner is gone or of another incarnation,
    Conflict if its geometry is not the described one, Misconfigured if this process cannot see the GPU or its memory.
    """
    layout = description.layout
    sizes = Geometry(description.blocks, description.tails, layout.page_bytes, layout.tail_bytes)
    host = shm.attach(description.model_copy(update={"kind": "shm", "layout": _without_bytes(layout)}))
    try:
        with host.path.open("rb") as file:
            found = os.pread(file.fileno(), RECORD.size, RECORD_AT)
        magic, uuid, handle, size, page_bytes = RECORD.unpack(found)
        if (magic, size, page_bytes) != (MAGIC, sizes.total - sizes.tails_at, layout.page_bytes):
            raise Conflict(f"pool {description.pool} has another geometry than its description")
        device = Device.by_uuid(uuid)
        try:
            pointer = device.open(handle)
        except Misconfigured as error:
            if shm.owner_lives(host.path):
                raise
            raise Stale(f"the memory of pool {description.pool} is gone") from error
        return CudaPool(host, device, pointer, sizes, owner=False)
    except BaseException:
        host.close()
        raise


def _without_bytes(layout: Layout) -> Layout:
    return layout.model_copy(update={"page_bytes": 0, "tail_bytes": 0})
