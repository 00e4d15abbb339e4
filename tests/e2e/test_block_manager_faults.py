"""Block manager and mover as processes that are killed, stopped and started again."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from shared import errors
from shared.handles import unpack_u32
from shared.messages import ActorExited, Lease
from shared.pool import attach
from tests.support import node_processes
from tests.support.node import BLOCK, Worker, everything_back, fill
from tests.support.node_processes import Processes

TOKENS = list(range(5 * BLOCK + 3))


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with node_processes.processes(tmp_path, ("a", "b")) as running:
        yield running


async def prefilled(worker: Worker, request_id: str = "r1") -> Lease:
    """A lease in pool a whose full pages are written and committed."""
    lease = await worker.acquire("a", TOKENS, request_id)
    pool = attach(await worker.describe("a"))
    fill(pool.pages, lease.table, 1)
    await worker.commit(lease, TOKENS)
    return lease


async def test_a_killed_block_manager_leaves_stale_handles_and_a_working_successor(processes: Processes) -> None:
    prefill, decode = await processes.node.worker("prefill"), await processes.node.worker("decode")
    await processes.ready(prefill)
    lease = await prefilled(prefill)
    pool = attach(await prefill.describe("a"))
    before = pool.pages[unpack_u32(lease.table.indices)].copy()
    processes.stop("block_manager", signal.SIGKILL)
    pool.check(lease.table, tail=lease.tail)  # the memory is still there, and nobody recycles it
    # until NATS has read the end of its connection, what is sent to it is lost
    with pytest.raises((errors.Unavailable, errors.Timeout)):
        await prefill.acquire("a", TOKENS, "r2", timeout_s=2)

    processes.start("block_manager")
    await processes.ready(prefill)
    with pytest.raises(errors.Stale):
        pool.check(lease.table, tail=lease.tail)
    np.testing.assert_array_equal(pool.pages[unpack_u32(lease.table.indices)], before)
    with pytest.raises(errors.Stale):
        await decode.adopt(lease, "b")
    fresh = await prefill.acquire("a", TOKENS, "r2")
    assert fresh.cached_tokens == 0 and fresh.lease != lease.lease
    assert await prefill.renew(lease, fresh) == [lease.lease]
    await prefill.release(lease)  # an old number never names a new lease
    assert await prefill.renew(fresh) == []
    await prefill.release(fresh)
    assert everything_back(await prefill.stats())


async def test_a_mover_that_stops_answering_costs_a_hand_over_and_no_page(processes: Processes) -> None:
    prefill, decode = await processes.node.worker("prefill"), await processes.node.worker("decode")
    admin = await processes.node.connect("admin")
    await processes.ready(prefill)
    lease = await prefilled(prefill)
    processes.send("offload", signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match="copied"):
        await decode.adopt(lease, "b")
    assert time.monotonic() - began < 5
    stats = await prefill.stats()
    assert (stats["b"].quarantined, stats["a"].leases, stats["b"].leases) == (6, 1, 0)
    assert await prefill.renew(lease) == []  # still prefill's: it may try elsewhere

    processes.stop("offload", signal.SIGKILL)
    processes.start("offload")
    assert (await prefill.stats())["b"].quarantined == 6  # not proven yet
    await admin.publish("event.actor.exited", ActorExited(actor="offload", instance="offload-1", pid=1, code=-9))
    await processes.copies_settled()
    assert (await prefill.stats())["b"].quarantined == 0
    await processes.ready(prefill)
    adopted = await decode.adopt(lease, "b")
    target = attach(await decode.describe("b"))
    source = attach(await decode.describe("a"))
    np.testing.assert_array_equal(
        target.pages[unpack_u32(adopted.table.indices)], source.pages[unpack_u32(lease.table.indices)]
    )
    await decode.release(adopted)
    assert everything_back(await prefill.stats())


async def test_a_mover_that_was_only_slow_says_so_when_it_is_back(processes: Processes) -> None:
    prefill, decode = await processes.node.worker("prefill"), await processes.node.worker("decode")
    await processes.ready(prefill)
    lease = await prefilled(prefill)
    processes.send("offload", signal.SIGSTOP)
    with pytest.raises(errors.Unavailable):
        await decode.adopt(lease, "b")
    await prefill.release(lease)  # cancelled meanwhile
    assert (await prefill.stats())["b"].quarantined == 6
    processes.send("offload", signal.SIGCONT)
    await processes.copies_settled()
    assert everything_back(await prefill.stats())


async def test_a_stopped_mover_makes_another_pools_pages_a_miss_in_time(processes: Processes) -> None:
    prefill, decode = await processes.node.worker("prefill"), await processes.node.worker("decode")
    await processes.ready(prefill)
    theirs = await decode.acquire("b", TOKENS, "r1")
    await decode.commit(theirs, TOKENS)
    processes.send("offload", signal.SIGSTOP)
    mine = await prefill.acquire("a", TOKENS, "r2", timeout_s=2.0)
    assert mine.cached_tokens == 0
    began = time.monotonic()
    again = await prefill.acquire("a", TOKENS, "r3", timeout_s=2.0)  # the mover is not trusted again so soon
    assert again.cached_tokens == 0 and time.monotonic() - began < 0.5
    for lease in (mine, again):
        await prefill.release(lease)
    await decode.release(theirs)
    processes.send("offload", signal.SIGCONT)
    await processes.copies_settled()
    assert everything_back(await prefill.stats())


async def test_sigterm_ends_both_cleanly(processes: Processes) -> None:
    await processes.ready(await processes.node.worker("prefill"))
    assert [processes.stop(actor) for actor in ("offload", "block_manager")] == [0, 0]
