"""Pool sizes: what is asked for, or what the machine allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.block_manager.sizing import blocks_of, tails_of
from shared.compute_environment import available_memory
from shared.errors import Misconfigured
from shared.settings import BlockManagerSettings
from tests.support.pools import tiny_layout

LAYOUT = tiny_layout(page_bytes=1 << 20, tail_bytes=1 << 20)


def test_the_override_wins_over_the_bytes() -> None:
    settings = BlockManagerSettings(num_blocks_override=77, kv_cache_memory_bytes=1 << 30)
    assert blocks_of(settings, LAYOUT, Path("/dev/shm"), 1) == 77


def test_bytes_are_pages() -> None:
    settings = BlockManagerSettings(kv_cache_memory_bytes=100 << 20)
    assert blocks_of(settings, LAYOUT, Path("/dev/shm"), 1) == 100


def test_by_default_the_pools_share_what_the_machine_can_spare(tmp_path: Path) -> None:
    settings = BlockManagerSettings(max_num_seqs=4)
    one, many = (blocks_of(settings, LAYOUT, tmp_path, pools) for pools in (1, 64))
    assert one <= 1024 and many < one
    assert 64 * many * (1 << 20) <= 0.3 * available_memory()
    assert tails_of(settings) == 8


def test_a_place_for_pools_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"nowhere.*KVRELAY_SHM_DIR"):
        blocks_of(BlockManagerSettings(), LAYOUT, tmp_path / "nowhere", 1)


def test_a_pool_that_is_too_small_for_anything_is_refused() -> None:
    with pytest.raises(Misconfigured, match="at least 4"):
        blocks_of(BlockManagerSettings(kv_cache_memory_bytes=2 << 20), LAYOUT, Path("/dev/shm"), 1)
