"""Pools on GPUs: the real block manager and the real mover, each a process, under the stand-in for the driver. Pages
written here by a worker's hand arrive in the other pool, whatever the two kinds of memory are."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from shared import errors
from shared.handles import BlockTable, unpack_u32
from shared.messages import ActorExited, Lease
from shared.pool import Pool, attach
from tests.support import fake_cuda, node_processes
from tests.support.node import BLOCK, everything_back, fill
from tests.support.node_processes import Processes

TOKENS = list(range(5 * BLOCK + 3))
PAIRS = [("cuda0", "cuda1"), ("cuda0-a", "cuda0-b"), ("cuda0", "cpu0"), ("cpu0", "cuda1")]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with fake_cuda.loaded(tmp_path, monkeypatch) as environment:
        yield environment


@pytest.fixture
async def processes(
    environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Processes]:
    async with node_processes.processes(tmp_path, getattr(request, "param", PAIRS[0]), environment) as running:
        yield running


def written(pool: Pool, table: BlockTable, seed: int) -> None:
    """Random bytes into the pages of a table."""
    if isinstance(pool.pages, np.ndarray):
        fill(pool.pages, table, seed)
        return
    content = np.zeros(pool.pages.shape, np.uint8)
    fill(content, table, seed)
    for index in unpack_u32(table.indices):
        pool.device.write(pool.pages.pointer + int(index) * pool.pages.shape[1], content[index].tobytes())


def read(pool: Pool, table: BlockTable) -> np.ndarray:
    indices = unpack_u32(table.indices)
    if isinstance(pool.pages, np.ndarray):
        return pool.pages[indices].copy()
    width = pool.pages.shape[1]
    pages = [pool.device.read(pool.pages.pointer + int(index) * width, width) for index in indices]
    return np.frombuffer(b"".join(pages), np.uint8).reshape(-1, width)


def tail(pool: Pool, lease: Lease, content: bytes = b"") -> bytes:
    """The first bytes of a lease's tail; `content` is written there first."""
    slot, width = lease.tail.slot, pool.tails.shape[1]
    if isinstance(pool.tails, np.ndarray):
        pool.tails[slot, : len(content)] = np.frombuffer(content, np.uint8)
        return pool.tails[slot, :8].tobytes()
    at = pool.tails.pointer + slot * width
    if content:
        pool.device.write(at, content)
    return bytes(pool.device.read(at, 8))


@pytest.mark.parametrize("processes", PAIRS, ids="-to-".join, indirect=True)
async def test_a_hand_over_and_a_hit_in_the_other_pool(processes: Processes) -> None:
    near, far = processes.pools
    prefill, decode = await processes.node.worker("prefill"), await processes.node.worker("decode")
    await processes.ready(prefill)
    here, there = attach(await prefill.describe(near)), attach(await decode.describe(far))
    lease = await prefill.acquire(near, TOKENS)
    written(here, lease.table, 1)
    tail(here, lease, b"the tail")
    await prefill.commit(lease, TOKENS)
    expected = read(here, lease.table)
    adopted = await decode.adopt(lease, far)
    there.check(adopted.table, tail=adopted.tail)
    np.testing.assert_array_equal(read(there, adopted.table), expected)
    assert tail(there, adopted) == b"the tail"
    await decode.release(adopted)

    other = [token + 1000 for token in TOKENS]
    theirs = await decode.acquire(far, other, "r2")
    written(there, theirs.table, 2)
    await decode.commit(theirs, other)
    hit = await prefill.acquire(near, other, "r3")
    assert hit.cached_tokens == 5 * BLOCK
    np.testing.assert_array_equal(read(here, hit.table)[:5], read(there, theirs.table)[:5])
    await prefill.release(hit)
    await decode.release(theirs)
    assert everything_back(await prefill.stats())
    here.close()
    there.close()


async def test_a_killed_block_managers_memory_comes_back_and_its_successor_works(processes: Processes) -> None:
    prefill = await processes.node.worker("prefill")
    await processes.ready(prefill)
    before = await prefill.describe("cuda0")
    pool = attach(before)
    free = pool.device.memory().free
    processes.stop("block_manager", signal.SIGKILL)
    pool.close()  # as a worker does when it sees the end of the epoch
    processes.start("block_manager")
    await processes.ready(prefill)
    after = await prefill.describe("cuda0")
    assert (after.epoch != before.epoch, after.blocks) == (True, before.blocks)
    assert pool.device.memory().free == free  # the mover let go, too


async def test_a_gpu_that_fails_costs_a_hand_over_and_a_mover_but_no_page(processes: Processes) -> None:
    prefill, decode = await processes.node.worker("prefill"), await processes.node.worker("decode")
    admin = await processes.node.connect("admin")
    await processes.ready(prefill)
    processes.stop("offload")
    processes.start("offload", FAKE_CUDA_FAIL="wait")
    mover = processes.running["offload"]
    await processes.heartbeat("offload", lambda beat: beat.ready and beat.pid == mover.pid)
    lease = await prefill.acquire("cuda0", TOKENS)
    with pytest.raises(errors.Unavailable, match="could not be copied"):
        await decode.adopt(lease, "cuda1")
    assert await asyncio.to_thread(mover.wait, 20) == 1
    assert (await prefill.stats())["cuda1"].quarantined == 6
    assert await prefill.renew(lease) == []  # still prefill's

    processes.start("offload")
    await admin.publish("event.actor.exited", ActorExited(actor="offload", instance="offload-1", pid=1, code=1))
    await processes.ready(prefill)
    await processes.copies_settled()
    assert (await prefill.stats())["cuda1"].quarantined == 0
    await decode.release(await decode.adopt(lease, "cuda1"))
    assert everything_back(await prefill.stats())
