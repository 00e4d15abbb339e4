"""The mover: right bytes, checked before and after, never under a new tenant, stopped when told."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.offload import mover as module
from services.offload.mover import Mover, Side, runs
from services.offload.tiers.base import Tier
from services.offload.tiers.memory import MemoryTier
from shared.errors import Cancelled, Conflict, Stale
from shared.handles import BlockTable, TailHandle
from shared.pool import Pool, attach
from shared.pool.shm import ShmPool
from tests.support.pools import describe, handles, make_pool, tiny_layout


class Pools:
    """Two pools with random bytes, and a mover."""

    def __init__(self, tmp_path: Path) -> None:
        self.a, self.b = (make_pool(tmp_path, name, blocks=16) for name in "ab")
        rng = np.random.default_rng(0)
        for pool in (self.a, self.b):
            pool.pages[:] = rng.integers(0, 256, pool.pages.shape, dtype=np.uint8)
            pool.tails[:] = rng.integers(0, 256, pool.tails.shape, dtype=np.uint8)
        self.mover = Mover()

    def side(self, pool: ShmPool, blocks: list[int], tail: int | None = None, tier: Tier | None = None) -> Side:
        table, handle = handles(pool, blocks, tail)
        return Side(tier or MemoryTier(pool), table, handle)


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pools]:
    monkeypatch.setenv("KVRELAY_SHM_DIR", str(tmp_path))
    pools = Pools(tmp_path)
    yield pools
    pools.mover.close()
    pools.a.close()
    pools.b.close()


class GatedTier(MemoryTier):
    """Memory whose reads wait until the test lets them go."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.reading, self.go = threading.Event(), threading.Event()

    def read(self, first: int, into: np.ndarray) -> None:
        self.reading.set()
        assert self.go.wait(10)
        super().read(first, into)


class ColdTier(Tier):
    """A tier that is not memory: pages are kept as bytes."""

    def __init__(self, pages: np.ndarray) -> None:
        self.stored = {index: page.tobytes() for index, page in enumerate(pages)}
        self.page_bytes = pages.shape[1]

    def check(self, table: BlockTable, tail: TailHandle | None) -> None:
        return

    def read(self, first: int, into: np.ndarray) -> None:
        for row, page in enumerate(into):
            page[:] = np.frombuffer(self.stored[first + row], dtype=np.uint8)

    def write(self, first: int, pages: np.ndarray) -> None:
        for row, page in enumerate(pages):
            self.stored[first + row] = page.tobytes()

    def finish(self) -> None:
        return

    def close(self) -> None:
        return


@pytest.mark.parametrize("piece", [1, 3 * 4096, 8 << 20])
def test_pages_and_tail_arrive_and_nothing_else_changes(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    sources, targets = [3, 4, 5, 6, 9, 0, 1, 15], [0, 1, 2, 9, 10, 4, 5, 15]
    expected, tails = pools.b.pages.copy(), pools.b.tails.copy()
    expected[targets] = pools.a.pages[sources]
    tails[1] = pools.a.tails[0]
    job = pools.mover.submit(1, pools.side(pools.a, sources, 0), pools.side(pools.b, targets, 1))
    copied = job.done.result(5)
    assert (copied.transfer, copied.pages, copied.bytes) == (1, 8, 8 * 4096 + 1024)
    np.testing.assert_array_equal(pools.b.pages, expected)
    np.testing.assert_array_equal(pools.b.tails, tails)
    assert pools.mover.running == []


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20))
def test_runs_say_the_same_as_pairs(pairs: list[tuple[int, int]]) -> None:
    sources, targets = (np.array([pair[side] for pair in pairs], dtype=np.uint32) for side in (0, 1))
    spelled = [(a + i, b + i) for a, b, length in runs(sources, targets) for i in range(length)]
    assert spelled == pairs
    for (a, b, length), following in pairwise(runs(sources, targets)):
        assert following[:2] != (a + length, b + length), "could be one run"


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_handle_that_is_stale_at_the_start_moves_nothing(pools: Pools, side: str) -> None:
    source, target = pools.side(pools.a, [1, 2]), pools.side(pools.b, [1, 2])
    (pools.a if side == "source" else pools.b).generations[2] += 1
    before = pools.b.pages.copy()
    with pytest.raises(Stale):
        pools.mover.submit(1, source, target).done.result(5)
    np.testing.assert_array_equal(pools.b.pages, before)


@pytest.mark.parametrize("side", ["source", "target", "tail", "epoch"])
def test_a_tenant_that_changes_during_the_copy_is_noticed(pools: Pools, side: str) -> None:
    gate = GatedTier(attach(describe(pools.a, tiny_layout())))
    source, target = pools.side(pools.a, [1, 2], 0, gate), pools.side(pools.b, [1, 2], 0)
    job = pools.mover.submit(1, source, target)
    assert gate.reading.wait(5) and pools.mover.running == [1]
    if side == "epoch":
        pools.a.close()
    else:
        pool, entry = {"source": (pools.a, 2), "target": (pools.b, 2), "tail": (pools.b, 16)}[side]
        pool.generations[entry] += 1
    gate.go.set()
    with pytest.raises(Stale):
        job.done.result(5)


def test_a_cancelled_copy_stops_and_is_running_until_it_has(pools: Pools) -> None:
    gate = GatedTier(pools.a)
    job = pools.mover.submit(1, pools.side(pools.a, [1, 5], tier=gate), pools.side(pools.b, [1, 5]))
    assert gate.reading.wait(5)
    before = pools.b.pages[5].copy()
    job.cancel()
    assert pools.mover.running == [1]
    gate.go.set()
    with pytest.raises(Cancelled):
        job.done.result(5)
    assert pools.mover.running == []
    np.testing.assert_array_equal(pools.b.pages[5], before)


def test_a_transfer_asked_for_twice_is_made_once(pools: Pools) -> None:
    gate = GatedTier(pools.a)
    sides = pools.side(pools.a, [1], tier=gate), pools.side(pools.b, [1])
    first, second = pools.mover.submit(7, *sides), pools.mover.submit(7, *sides)
    assert first is second
    gate.go.set()
    assert first.done.result(5).pages == 1


def test_tables_must_pair(pools: Pools) -> None:
    for source, target in (
        (pools.side(pools.a, [1, 2]), pools.side(pools.b, [1])),
        (pools.side(pools.a, [1], 0), pools.side(pools.b, [1])),
    ):
        with pytest.raises(Conflict):
            pools.mover.submit(1, source, target)
    assert pools.mover.submit(2, pools.side(pools.a, []), pools.side(pools.b, [])).done.result(5).pages == 0


def test_a_tier_that_is_not_memory_can_be_either_side(pools: Pools) -> None:
    cold = ColdTier(pools.b.pages)
    out = Side(cold, handles(pools.b, [0, 1, 2])[0])
    pools.mover.submit(1, pools.side(pools.a, [4, 5, 9]), out).done.result(5)
    expected = pools.a.pages[[4, 5, 9]].copy()
    pools.a.pages[:] = 0
    pools.mover.submit(2, out, pools.side(pools.a, [7, 8, 3])).done.result(5)
    np.testing.assert_array_equal(pools.a.pages[[7, 8, 3]], expected)
    with pytest.raises(Conflict, match="memory"):
        pools.mover.submit(3, out, out).done.result(5)
    with pytest.raises(Conflict, match="tails"):
        pools.mover.submit(4, dataclasses.replace(out, tail=TailHandle(slot=0, generation=0)),
                           pools.side(pools.a, [7, 8, 3], 0)).done.result(5)  # fmt: skip
    cold.page_bytes += 1
    with pytest.raises(Conflict, match="size"):
        pools.mover.submit(5, out, pools.side(pools.a, [7, 8, 3]))


def test_a_failing_tier_fails_its_transfer_and_no_other(pools: Pools) -> None:
    broken = ColdTier(pools.b.pages)
    del broken.stored[1]
    with pytest.raises(KeyError):
        pools.mover.submit(1, Side(broken, handles(pools.b, [1])[0]), pools.side(pools.a, [1])).done.result(5)
    assert pools.mover.submit(2, pools.side(pools.a, [1]), pools.side(pools.b, [1])).done.result(5).pages == 1


def test_closing_stops_what_runs(pools: Pools) -> None:
    gate = GatedTier(pools.a)
    job = pools.mover.submit(1, pools.side(pools.a, [1, 5], tier=gate), pools.side(pools.b, [1, 5]))
    assert gate.reading.wait(5)
    closing = threading.Thread(target=pools.mover.close)
    closing.start()
    gate.go.set()
    closing.join(5)
    assert not closing.is_alive() and isinstance(job.done.exception(0), Cancelled)
