"""Pools in POSIX shared memory: one file in /dev/shm (or KVRELAY_SHM_DIR), mapped by every process of the node.

    page 0   magic "KVRELAYP", version, epoch, blocks, tails, page_bytes, tail_bytes, total bytes   (little-endian)
    then     generations u32 [blocks + tails] · tails u8 [tails, tail_bytes] · pages u8 [blocks, page_bytes]

Each part starts on a 4 KiB boundary. The owner holds a lock on the file while it lives. An owner that starts finds
its predecessor's file under the same name, zeroes the epoch in it, so that whoever still maps it sees `Stale`,
unlinks it, and makes a new file: old readers keep old memory and can never see a new tenant's bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import struct
import threading
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np

from shared.errors import Conflict, Misconfigured, Stale
from shared.handles import Layout
from shared.messages import PoolDescription
from shared.pool import huge_pages
from shared.pool.base import Pool

MAGIC: Final = b"KVRELAYP"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIIIIQQQ")
EPOCH_AT: Final = 12
PAGE: Final = 4096
PATIENCE_S = 3.0
UNFINISHED_S: Final = 60.0
"""A file that is still being made after this long has lost its maker."""
WARM_BYTES: Final = 16 << 30
WARM_STEP: Final = 16 << 20
MADV_POPULATE_WRITE: Final = 23
_PREFIX: Final = "kvrelay-"


def _round_up(value: int) -> int:
    return -(-value // PAGE) * PAGE


class Geometry:
    """Where the parts of the file are, in bytes."""

    def __init__(self, blocks: int, tails: int, page_bytes: int, tail_bytes: int) -> None:
        self.blocks, self.tails, self.page_bytes, self.tail_bytes = blocks, tails, page_bytes, tail_bytes
        self.generations_at = PAGE
        self.tails_at = self.generations_at + _round_up(4 * (blocks + tails))
        self.pages_at = self.tails_at + _round_up(tails * tail_bytes)
        self.total = self.pages_at + _round_up(blocks * page_bytes)

    def header(self, epoch: int) -> bytes:
        return HEADER.pack(MAGIC, VERSION, epoch, self.blocks, self.tails, self.page_bytes, self.tail_bytes, self.total)


class ShmPool(Pool):
    """A mapped pool file. The owner's copy (`create`) also holds the lock and removes the file on `close()`."""

    def __init__(self, name: str, path: Path, epoch: int, geometry: Geometry, descriptor: int, owner: bool) -> None:
        self.name, self.path, self.epoch = name, path, epoch
        self.blocks, self.slots = geometry.blocks, geometry.tails
        self._owned = descriptor if owner else None
        whole = huge_pages.map_file(descriptor, geometry.total)
        self._epoch = whole[EPOCH_AT : EPOCH_AT + 4].view("<u4")
        entries = geometry.blocks + geometry.tails
        at = geometry.generations_at
        self.generations = whole[at : at + 4 * entries].view("<u4")
        at = geometry.tails_at
        self.tails = whole[at : at + geometry.tails * geometry.tail_bytes].reshape(geometry.tails, geometry.tail_bytes)
        at = geometry.pages_at
        self.pages = whole[at : at + geometry.blocks * geometry.page_bytes].reshape(
            geometry.blocks, geometry.page_bytes
        )

    def live_epoch(self) -> int:
        return int(self._epoch[0])

    def warm(self) -> None:
        """Fills this process's page tables: without huge pages 1 µs per 4 KiB, which the first touch would cost else.

        Only takes time of the calling thread's core that nobody else wants: a large pool needs seconds, and others are
        serving by then. Where the kernel cannot do that (before Linux 5.14), nothing happens.
        """
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: the calling thread, not the process
        pages, libc = self.pages, ctypes.CDLL(None)
        for at in range(0, min(pages.nbytes, WARM_BYTES), WARM_STEP):
            if self.pages is not pages:  # closed
                return
            size = min(WARM_STEP, pages.nbytes - at)
            if libc.madvise(ctypes.c_void_p(pages.ctypes.data + at), ctypes.c_size_t(size), MADV_POPULATE_WRITE):
                return

    def close(self) -> None:
        if self._owned is not None:
            self._epoch[0] = 0
            self.path.unlink(missing_ok=True)
            os.close(self._owned)
            self._owned = None
        nothing = np.empty((0, 0), dtype=np.uint8)
        self.pages = self.tails = nothing
        # The map itself goes with the last array that still refers to it (a torch view in a worker, for example).


def directory() -> Path:
    """Where pool files live: KVRELAY_SHM_DIR, else /dev/shm."""
    return Path(os.environ.get("KVRELAY_SHM_DIR") or "/dev/shm")


def pool_path(name: str, state_dir: Path | str) -> Path:
    """The file of pool `name` of the pipeline whose state lives in `state_dir`; two pipelines never share one."""
    owner = blake2b(os.fsencode(Path(state_dir).resolve()), digest_size=6).hexdigest()
    return directory() / f"{_PREFIX}{owner}-{name}"


def create(name: str, state_dir: Path | str, layout: Layout, blocks: int, tails: int) -> ShmPool:
    """Makes the memory of a pool and owns it until `close()` or the end of the process.

    The memory is reserved whole, so that a small /dev/shm shows here and not as SIGBUS later. Raises Misconfigured
    if there is no room, the directory cannot be used, or a living process owns this pool.
    """
    path = pool_path(name, state_dir)
    geometry = Geometry(blocks, tails, layout.page_bytes, layout.tail_bytes)
    retire(path)
    epoch = secrets.randbelow(2**32 - 1) + 1
    descriptor = -1
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, geometry.total)
        huge_pages.fill(descriptor, geometry.total)
        os.posix_fallocate(descriptor, 0, geometry.total)
        os.pwrite(descriptor, geometry.header(epoch), 0)
        os.link(fresh, path)  # unlike rename, fails if somebody else has just created it
        fresh.unlink()
    except OSError as error:
        if descriptor >= 0:
            fresh.unlink(missing_ok=True)
            os.close(descriptor)
        raise _explained(error, name, geometry) from error
    return ShmPool(name, path, epoch, geometry, descriptor, owner=True)


def attach(description: PoolDescription) -> ShmPool:
    """Maps the pool an owner described. Raises Stale (gone, or another incarnation) or Conflict (other geometry)."""
    try:
        descriptor = os.open(description.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Stale(f"the memory of pool {description.pool} is gone") from error
    try:
        layout = description.layout
        geometry = Geometry(description.blocks, description.tails, layout.page_bytes, layout.tail_bytes)
        found = os.pread(descriptor, HEADER.size, 0)
        wanted = geometry.header(description.epoch)
        if found[:EPOCH_AT] != wanted[:EPOCH_AT]:
            raise Conflict(f"{description.path} is no pool of this version")
        if found[: EPOCH_AT + 4] != wanted[: EPOCH_AT + 4]:  # its successor may well have another geometry
            raise Stale(f"pool {description.pool} has been created anew")
        if found != wanted:
            raise Conflict(f"pool {description.pool} has another geometry than its description")
        if os.fstat(descriptor).st_size < geometry.total:
            raise Conflict(f"the file of pool {description.pool} is shorter than its geometry")
        pool = ShmPool(description.pool, Path(description.path), description.epoch, geometry, descriptor, owner=False)
    finally:
        os.close(descriptor)  # the mapping keeps the memory
    threading.Thread(target=pool.warm, name="pool-warm", daemon=True).start()
    return pool


def retire(path: Path) -> None:
    """Ends an earlier incarnation found under `path`, and clears away what other owners left when they were killed.

    A predecessor that is still dying (unmapping a large pool takes a while) gets `PATIENCE_S` to let go of its lock.
    """
    give_up = time.monotonic() + PATIENCE_S
    while not _remove_unlocked(path):
        if time.monotonic() > give_up:
            raise Misconfigured(f"another block manager owns {path}; stop it, or use another --state-dir or pool name")
        time.sleep(0.05)
    for other in path.parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, Misconfigured):  # another user's, or gone by now
            if not other.suffix or time.time() - other.stat().st_mtime > UNFINISHED_S:
                _remove_unlocked(other)


def owner_lives(path: Path) -> bool:
    """Whether the owner of the pool file at `path` still runs."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _remove_unlocked(path: Path) -> bool:
    """Removes a pool file whose owner is dead, after telling its readers; True if it is gone, False if its owner lives.

    A file gets its final name only once it is locked, so whoever can lock it may remove it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise Misconfigured(f"cannot open {path}: {error.strerror}; remove it or set KVRELAY_SHM_DIR") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(descriptor, len(MAGIC), 0) == MAGIC:
            os.pwrite(descriptor, bytes(4), EPOCH_AT)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _explained(error: OSError, name: str, geometry: Geometry) -> Misconfigured:
    place = directory()
    if error.errno == errno.EEXIST:
        return Misconfigured(f"another block manager has just created pool {name} in {place}; stop one of the two")
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
        return Misconfigured(f"cannot create pool {name} in {place}: {error.strerror}; set KVRELAY_SHM_DIR")
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        free = 0
    fits = max(0, free - geometry.pages_at) // max(1, geometry.page_bytes)
    return Misconfigured(
        f"pool {name} needs {geometry.total / 2**20:.0f} MiB of shared memory and {place} has {free / 2**20:.0f} MiB "
        "free. "
        f"Containers get 64 MiB by default: start them with --shm-size={-(-geometry.total // 2**30) + 1}g, or set "
        f"KVRELAY_SHM_DIR to a directory with room, or use fewer pages (--num-blocks-override {fits} would fit)."
    )
