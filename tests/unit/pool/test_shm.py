"""Shared-memory pools: incarnations, owners that die, directories that are too small."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.errors import Conflict, Misconfigured, Stale
from shared.messages import PoolDescription
from shared.pool import attach, shm
from tests.support.pools import describe, handles, make_pool, tiny_layout

OWNER = textwrap.dedent(
    """
    import sys, time
    from tests.support.pools import make_pool
    pool = make_pool(sys.argv[1])
    print(pool.epoch, flush=True)
    time.sleep(60)
    """
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setenv("KVRELAY_SHM_DIR", str(place))
    yield place
    assert list(place.iterdir()) == [], "a pool left something behind"


def owner_process(state_dir: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(state_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_bytes_and_generations_are_shared(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    other = attach(describe(pool, tiny_layout()))
    other.pages[7] = 5
    other.tails[1] = 6
    pool.generations[[7, 9]] += 1
    assert (pool.pages[7] == 5).all() and (pool.tails[1] == 6).all() and not pool.pages[:7].any()
    assert other.generations.tolist() == [0] * 7 + [1, 0, 1]
    assert pool.pages.ctypes.data % 4096 == 0 and pool.tails.ctypes.data % 64 == 0
    other.close()
    pool.close()


def test_a_closed_pool_is_stale_for_its_readers_but_stays_readable(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    description = describe(pool, tiny_layout())
    other = attach(description)
    table, tail = handles(pool, [1, 2], 0)
    other.check(table, tail=tail)
    kept = other.pages
    pool.close()
    pool.close()
    with pytest.raises(Stale, match="anew"):
        other.check(table, tail=tail)
    assert other.live_epoch() == 0 and not kept.any()
    with pytest.raises(Stale, match="gone"):
        attach(description)


def test_an_owner_that_was_killed_is_succeeded_and_its_readers_see_stale(tmp_path: Path) -> None:
    process, epoch = owner_process(tmp_path)
    with process:
        path = shm.pool_path("p", tmp_path)
        reader = attach(describe_killed(path, epoch))
        table, _ = handles(reader, [0, 1])
        reader.pages[0] = 9
        os.kill(process.pid, signal.SIGKILL)
    reader.check(table)  # nobody recycles anything yet
    successor = make_pool(tmp_path)
    assert successor.epoch != epoch
    with pytest.raises(Stale):
        reader.check(table)
    assert (reader.pages[0] == 9).all() and not successor.pages.any()
    with pytest.raises(Stale, match="not of pool"):
        successor.check(table)
    with pytest.raises(Stale):
        attach(describe_killed(path, epoch))
    successor.close()


def describe_killed(path: Path, epoch: int) -> PoolDescription:
    return PoolDescription(
        pool="p", kind="shm", path=str(path), epoch=epoch, blocks=8, tails=2, layout=tiny_layout(), max_model_len=16
    )


def test_a_living_owner_is_not_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "PATIENCE_S", 0.1)
    process, _ = owner_process(tmp_path)
    with process:
        with pytest.raises(Misconfigured, match="another block manager"):
            make_pool(tmp_path)
        assert make_pool(tmp_path / "other").close() is None
        process.terminate()
    make_pool(tmp_path).close()


def test_what_killed_owners_left_is_cleared_away_and_the_living_are_not_touched(tmp_path: Path) -> None:
    process, epoch = owner_process(tmp_path / "killed")
    with process:
        reader = attach(describe_killed(shm.pool_path("p", tmp_path / "killed"), epoch))
        os.kill(process.pid, signal.SIGKILL)
    living = make_pool(tmp_path / "living")
    path = shm.pool_path("p", tmp_path)
    unfinished, fresh = (path.with_name(f"{path.name}.{pid}") for pid in (99998, 99999))
    for file in (unfinished, fresh):
        file.write_bytes(b"half")
    os.utime(unfinished, (0, 0))
    make_pool(tmp_path).close()
    assert reader.live_epoch() == 0 and not reader.path.exists()
    assert not unfinished.exists() and fresh.exists(), "somebody may be making it right now"
    assert living.live_epoch() == living.epoch and living.path.exists()
    fresh.unlink()
    living.close()


@pytest.mark.parametrize("change", [{"blocks": 9}, {"tails": 3}])
def test_another_geometry_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    pool = make_pool(tmp_path)
    description = describe(pool, tiny_layout())
    with pytest.raises(Conflict, match="geometry"):
        attach(description.model_copy(update=change))
    with pytest.raises(Conflict, match="geometry"):
        attach(description.model_copy(update={"layout": tiny_layout(page_bytes=8192)}))
    os.truncate(pool.path, 4096)
    with pytest.raises(Conflict, match="shorter"):
        attach(description)
    pool.close()


def test_a_successor_of_another_geometry_is_stale_and_no_conflict(tmp_path: Path) -> None:
    first = make_pool(tmp_path)
    description = describe(first, tiny_layout())
    first.close()
    successor = make_pool(tmp_path, blocks=3 * description.blocks)
    with pytest.raises(Stale, match="anew"):
        attach(description)
    successor.path.write_bytes(bytes(4096))
    with pytest.raises(Conflict, match="no pool"):
        attach(description)
    successor.close()


def test_a_file_that_is_no_pool_is_replaced(tmp_path: Path) -> None:
    shm.pool_path("p", tmp_path).write_bytes(b"something else")
    make_pool(tmp_path).close()


def test_too_little_room_says_what_to_do(tmp_path: Path, directory: Path) -> None:
    blocks = shutil.disk_usage(directory).total // 2**20 + 1024
    with pytest.raises(Misconfigured, match="--shm-size") as caught:
        make_pool(tmp_path, blocks=blocks, page_bytes=2**20)
    assert "KVRELAY_SHM_DIR" in str(caught.value) and "--num-blocks-override" in str(caught.value)


def test_a_missing_directory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_SHM_DIR", str(tmp_path / "missing"))
    with pytest.raises(Misconfigured, match="KVRELAY_SHM_DIR"):
        make_pool(tmp_path)


def test_check_accepts_arrays_and_refuses_what_it_cannot_know(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    indices = np.array([3, 4], dtype=np.uint32)
    pool.check(indices, pool.generations[indices].copy())
    pool.check(indices[:0], indices[:0])
    for wrong in (
        lambda: pool.check(indices),
        lambda: pool.check(indices, indices[:1]),
        lambda: pool.check(np.array([8], dtype=np.uint32), np.zeros(1, dtype=np.uint32)),
    ):
        with pytest.raises(Stale):
            wrong()
    pool.close()
