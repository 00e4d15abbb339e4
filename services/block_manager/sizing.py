"""How many pages and tails a pool gets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from shared.errors import Misconfigured
from shared.handles import Layout
from shared.settings import BlockManagerSettings

DEFAULT_BYTES: Final = 1 << 30
MEMORY_SHARE: Final = 0.25
SHM_SHARE: Final = 0.8
MIN_BLOCKS: Final = 4
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes this process may still use: what the kernel says is available, or what is left of the cgroup's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))


def blocks_of(
    settings: BlockManagerSettings, layout: Layout, shm: Path, pools: int, device_room: int | None = None
) -> int:
    """Pages of each of `pools` pools: as set, else 1 GiB or what the machine allows (a quarter of the memory that is
    available, 80 % of the shared memory, shared by the pools), or `device_room` bytes for a pool on a GPU. Raises
    Misconfigured below 4."""
    if settings.num_blocks_override is not None:
        blocks = settings.num_blocks_override
    elif settings.kv_cache_memory_bytes is not None:
        blocks = settings.kv_cache_memory_bytes // layout.page_bytes
    elif device_room is not None:
        blocks = (device_room - tails_of(settings) * layout.tail_bytes) // layout.page_bytes
    else:
        room = min(MEMORY_SHARE * available_memory(), SHM_SHARE * shutil.disk_usage(shm).free) / pools
        blocks = int(min(DEFAULT_BYTES, room) - tails_of(settings) * layout.tail_bytes) // layout.page_bytes
    if blocks < MIN_BLOCKS:
        raise Misconfigured(
            f"a pool of {max(0, blocks)} pages of {layout.page_bytes} bytes cannot serve anything: "
            f"give kv_cache_memory_bytes or num_blocks_override for at least {MIN_BLOCKS} pages"
        )
    return blocks


def tails_of(settings: BlockManagerSettings) -> int:
    """Tail slots of each pool: a full decode batch, and as many sequences again in prefill or on their way."""
    return 2 * settings.max_num_seqs
