"""How many pages and tails a pool gets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from shared.compute_environment import available_memory
from shared.errors import Misconfigured
from shared.handles import Layout
from shared.settings import BlockManagerSettings

DEFAULT_BYTES: Final = 1 << 30
MEMORY_SHARE: Final = 0.25
SHM_SHARE: Final = 0.8
MIN_BLOCKS: Final = 4


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
        room = min(MEMORY_SHARE * available_memory(), SHM_SHARE * _free(shm)) / pools
        blocks = int(min(DEFAULT_BYTES, room) - tails_of(settings) * layout.tail_bytes) // layout.page_bytes
    if blocks < MIN_BLOCKS:
        raise Misconfigured(
            f"a pool of {max(0, blocks)} pages of {layout.page_bytes} bytes cannot serve anything: "
            f"give kv_cache_memory_bytes or num_blocks_override for at least {MIN_BLOCKS} pages"
        )
    return blocks


def _free(shm: Path) -> int:
    try:
        return shutil.disk_usage(shm).free
    except OSError as error:
        raise Misconfigured(f"pools cannot be in {shm}: {error.strerror}; set KVRELAY_SHM_DIR") from error


def tails_of(settings: BlockManagerSettings) -> int:
    """Tail slots of each pool: a full decode batch, and as many sequences again in prefill or on their way."""
    return 2 * settings.max_num_seqs
