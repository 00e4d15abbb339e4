"""Copies that touch GPU memory, under the stand-in for the driver, whose copies are late: right bytes, and finished
before they are checked and reported, whatever comes between."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.offload import mover as module
from services.offload.mover import Mover, Side
from services.offload.tiers.base import PoolTier
from services.offload.tiers.cuda import CudaTier
from services.offload.tiers.memory import MemoryTier
from shared.errors import Cancelled, Stale
from shared.messages import PoolDescription
from shared.pool import Pool, attach, cuda_driver
from shared.pool.cuda_driver import DeviceFailed
from tests.support import fake_cuda
from tests.support.pools import handles

NAMES = ("cuda0", "cuda0-b", "cuda1", "cpu0", "cpu1")
OWNER = """
import sys
from shared.messages import PoolDescription
from shared.pool import create, kind_of
from tests.support.pools import tiny_layout

pools = [create(name, sys.argv[1], tiny_layout(), 16, 2) for name in sys.argv[2:]]
for pool in pools:
    print(PoolDescription(pool=pool.name, kind=kind_of(pool.name), path=str(pool.path), epoch=pool.epoch,
                          blocks=16, tails=2, layout=tiny_layout(), max_model_len=16).model_dump_json(), flush=True)
sys.stdin.readline()
"""


def device_bytes(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Pages and tails as they are, by a copy that does not wait for any stream."""
    found = []
    for memory in (pool.pages, pool.tails):
        raw = memory.tobytes() if isinstance(memory, np.ndarray) else pool.device.read(memory.pointer, memory.nbytes)
        found.append(np.frombuffer(raw, np.uint8).reshape(memory.shape).copy())
    return found[0], found[1]


class Pools:
    """Pools of another process, with random bytes, and a mover."""

    def __init__(self, owner: subprocess.Popen[str]) -> None:
        assert owner.stdout is not None
        descriptions = [PoolDescription.model_validate_json(owner.stdout.readline()) for _ in NAMES]
        self.of = {description.pool: attach(description) for description in descriptions}
        self.tiers = {name: self.tier(pool) for name, pool in self.of.items()}
        self.mover = Mover()
        rng = np.random.default_rng(0)
        for pool in self.of.values():
            for memory in (pool.pages, pool.tails):
                content = rng.integers(0, 256, memory.shape, dtype=np.uint8)
                if isinstance(memory, np.ndarray):
                    memory[:] = content
                else:
                    pool.device.write(memory.pointer, content.tobytes())

    @staticmethod
    def tier(pool: Pool) -> PoolTier:
        return MemoryTier(pool) if isinstance(pool.pages, np.ndarray) else CudaTier(pool)

    def side(self, name: str, blocks: list[int], tail: int | None = None, tier: PoolTier | None = None) -> Side:
        table, handle = handles(self.of[name], blocks, tail)
        return Side(tier or self.tiers[name], table, handle)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with fake_cuda.loaded(tmp_path, monkeypatch) as environment:
        yield environment


@pytest.fixture
def pools(environment: dict[str, str], tmp_path: Path) -> Iterator[Pools]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), *NAMES], env=environment, cwd=fake_cuda.ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        pools = Pools(owner)
        yield pools
        pools.mover.close()
        for tier in pools.tiers.values():
            tier.close()
    finally:
        owner.communicate("\n", timeout=30)


PAIRS = [("cuda0", "cuda0-b"), ("cuda0", "cuda1"), ("cuda1", "cuda0"), ("cuda1", "cpu0"), ("cpu0", "cuda0"),
         ("cpu0", "cpu1")]  # fmt: skip


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_pages_and_tail_arrive_and_nothing_else_changes(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], locked: bool
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 3 * 4096)
    monkeypatch.setattr(module, "UNDER_WAY_BYTES", 4 * 4096)
    for tier in pools.tiers.values():
        if locked and isinstance(tier, MemoryTier):
            assert tier.page_lock(cuda_driver.Device(1))
    source, target = (pools.of[name] for name in pair)
    sources, targets = [3, 4, 5, 6, 9, 0, 1, 15], [0, 1, 2, 3, 10, 4, 5, 15]
    (pages, tails), (expected, expected_tails) = device_bytes(source), device_bytes(target)
    expected[targets], expected_tails[1] = pages[sources], tails[0]
    copied = pools.mover.submit(1, pools.side(pair[0], sources, 0), pools.side(pair[1], targets, 1)).done.result(5)
    assert (copied.transfer, copied.pages, copied.bytes) == (1, 8, 8 * 4096 + 1024)
    for found, wanted in zip(device_bytes(target), (expected, expected_tails), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(device_bytes(source), (pages, tails), strict=True):
        np.testing.assert_array_equal(found, wanted)


class Gated(CudaTier):
    """Waits for the test before it waits for the device."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)  # type: ignore[arg-type]
        self.finishing, self.go = threading.Event(), threading.Event()

    def finish(self) -> None:
        self.finishing.set()
        assert self.go.wait(10)
        super().finish()


@pytest.mark.parametrize("pair", PAIRS[:5], ids="-to-".join)
def test_a_tenant_that_changes_while_the_device_copies_is_noticed(pools: Pools, pair: tuple[str, str]) -> None:
    gated = pair[0] if pair[0].startswith("cuda") else pair[1]
    tier = Gated(pools.of[gated])
    sides = [pools.side(name, [1, 2], 0, tier if name == gated else None) for name in pair]
    before = device_bytes(pools.of[pair[1]])[0]
    job = pools.mover.submit(1, *sides)
    assert tier.finishing.wait(5) and pools.mover.running == [1]
    np.testing.assert_array_equal(device_bytes(pools.of[pair[1]])[0], before)  # nothing has moved yet
    pools.of[pair[1]].generations[2] += 1
    tier.go.set()
    with pytest.raises(Stale):
        job.done.result(5)


def test_a_cancelled_copy_is_running_until_the_device_has_done_what_it_was_given(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(module, "UNDER_WAY_BYTES", 4096)
    tier = Gated(pools.of["cuda0"])
    pages, expected = device_bytes(pools.of["cuda0"])[0], device_bytes(pools.of["cuda1"])[0]
    expected[1] = pages[1]
    job = pools.mover.submit(1, pools.side("cuda0", [1, 5], tier=tier), pools.side("cuda1", [1, 5]))
    assert tier.finishing.wait(5)
    job.cancel()
    assert pools.mover.running == [1]
    tier.go.set()
    with pytest.raises(Cancelled):
        job.done.result(5)
    assert pools.mover.running == []
    np.testing.assert_array_equal(device_bytes(pools.of["cuda1"])[0], expected)


def test_a_refused_copy_fails_when_the_others_are_done(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, expected = device_bytes(pools.of["cuda0"])[0], device_bytes(pools.of["cuda1"])[0]
    expected[3] = pages[1]
    monkeypatch.setenv("FAKE_CUDA_FAIL", "copy")
    job = pools.mover.submit(1, pools.side("cuda0", [1, 5]), pools.side("cuda1", [3, 9]))
    with pytest.raises(DeviceFailed, match="GPU 0: cannot copy to GPU 1"):
        job.done.result(5)
    np.testing.assert_array_equal(device_bytes(pools.of["cuda1"])[0], expected)
    assert pools.mover.running == []


def test_a_device_that_is_lost_fails_the_copy(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_FAIL", "wait")
        job = pools.mover.submit(1, pools.side("cuda0", [1], 0), pools.side("cpu0", [3], 0))
        with pytest.raises(DeviceFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS, 700"):
            job.done.result(5)


def test_memory_that_cannot_be_page_locked_is_copied_all_the_same(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "pin")
    host = pools.tiers["cpu0"]
    assert isinstance(host, MemoryTier) and not host.page_lock(cuda_driver.Device(0))
    pages = device_bytes(pools.of["cuda0"])[0]
    pools.mover.submit(1, pools.side("cuda0", [1]), pools.side("cpu0", [3])).done.result(5)
    np.testing.assert_array_equal(pools.of["cpu0"].pages[3], pages[1])
