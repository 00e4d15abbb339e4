"""Block manager and mover as processes see them: real NATS with its permissions, real shared memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from nats.aio.msg import Msg

from services.block_manager.actor import BlockManager
from shared import errors
from shared.handles import unpack_u32
from shared.messages import ActorExited, Commit, CommitItem, Message, Pin, Pinned, PoolFreed, Preempt, Renewed
from shared.pool import attach
from shared.wire import decode
from tests.support.manual_clock import ManualClock
from tests.support.node import BLOCK, Node, Worker, everything_back, fill
from tests.support.waiting import until

M = TypeVar("M", bound=Message)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with contextlib.AsyncExitStack() as stack:
        yield await Node.start(tmp_path, stack)


async def test_a_prompt_is_computed_once_and_found_again(node: Node) -> None:
    manager = await node.manager()
    worker = await node.worker("prefill")
    description = await worker.describe("cpu0")
    tokens = list(range(3 * BLOCK + 5))
    lease = await worker.acquire("cpu0", tokens)
    assert (len(lease.table), lease.cached_tokens) == (4, 0)
    pool = attach(description)
    pool.check(lease.table, tail=lease.tail)
    await worker.commit(lease, tokens)
    again = await worker.acquire("cpu0", tokens, "r2")
    assert again.cached_tokens == 3 * BLOCK
    assert again.table.indices[:12] == lease.table.indices[:12]
    await worker.release(lease)
    await worker.release(again)
    stats = (await worker.stats())["cpu0"]
    assert (stats.free, stats.cached, stats.leases, stats.tails_free) == (29, 3, 0, 16)
    assert (stats.prompt_tokens, stats.hit_tokens) == (2 * len(tokens), 3 * BLOCK)
    assert manager.node.check() == []
    await worker.describe("cpu0", description.layout.fingerprint)
    with pytest.raises(errors.Conflict, match="fingerprint"):
        await worker.describe("cpu0", "feed")
    with pytest.raises(errors.NotFound):
        await worker.describe("cpu7")
    with pytest.raises(errors.TooLarge):
        await worker.acquire("cpu0", list(range(description.max_model_len + 1)))


async def test_without_prefix_caching_nothing_is_found(node: Node) -> None:
    await node.manager(enable_prefix_caching=False)
    worker = await node.worker("prefill")
    tokens = list(range(3 * BLOCK))
    lease = await worker.acquire("cpu0", tokens)
    assert (await worker.commit(lease, tokens)).lost == []
    assert (await worker.acquire("cpu0", tokens, "r2")).cached_tokens == 0
    await worker.release(lease)
    assert (await worker.stats())["cpu0"].cached == 0


async def test_adopting_into_another_pool_copies_pages_and_tail(node: Node) -> None:
    manager, prefill, decode = await two_pools(node)
    source, target = attach(await prefill.describe("a")), attach(await decode.describe("b"))
    tokens = list(range(5 * BLOCK + 3))
    lease = await prefill.acquire("a", tokens)
    fill(source.pages, lease.table, 1)
    source.tails[lease.tail.slot] = 77
    await prefill.commit(lease, tokens)
    adopted, twice = await asyncio.gather(decode.adopt(lease, "b"), decode.adopt(lease, "b"))
    assert adopted == twice == await decode.adopt(lease, "b")  # asked often, moved once
    assert (adopted.lease, adopted.table.pool) == (lease.lease, "b")
    target.check(adopted.table, tail=adopted.tail)
    np.testing.assert_array_equal(
        target.pages[unpack_u32(adopted.table.indices)], source.pages[unpack_u32(lease.table.indices)]
    )
    assert (target.tails[adopted.tail.slot] == 77).all()
    stats = await decode.stats()
    assert (stats["a"].leases, stats["a"].cached, stats["b"].leases, stats["b"].active) == (0, 5, 1, 5)
    await decode.release(adopted)
    assert everything_back(await decode.stats()) and manager.node.check() == []


async def test_what_the_other_pool_has_is_a_hit_and_is_copied_once(node: Node) -> None:
    manager, prefill, decode = await two_pools(node)
    here, there = attach(await prefill.describe("a")), attach(await decode.describe("b"))
    tokens = list(range(5 * BLOCK + 3))
    lease = await decode.acquire("b", tokens, "r0")
    fill(there.pages, lease.table, 1)
    await decode.commit(lease, tokens)
    await decode.release(lease)
    leases = await asyncio.gather(*(prefill.acquire("a", tokens, f"r{i}") for i in range(1, 5)))
    for one in leases:
        assert one.cached_tokens == 5 * BLOCK
        here.check(one.table)
        assert one.table.indices[:20] == leases[0].table.indices[:20]
    np.testing.assert_array_equal(
        here.pages[unpack_u32(leases[0].table.indices)[:5]], there.pages[unpack_u32(lease.table.indices)[:5]]
    )
    stats = (await prefill.stats())["a"]
    assert (stats.active, stats.hit_tokens, stats.prompt_tokens) == (5, 20 * BLOCK, 4 * len(tokens))
    for one in leases:
        await prefill.release(one)
    assert everything_back(await prefill.stats()) and manager.node.check() == []


async def test_without_a_mover_another_pool_is_a_miss_and_a_hand_over_unavailable(node: Node) -> None:
    manager = await node.manager(prefill_pool="a", decode_pool="b")
    prefill, decode = await node.worker("prefill"), await node.worker("decode")
    tokens = list(range(2 * BLOCK))
    lease = await decode.acquire("b", tokens)
    await decode.commit(lease, tokens)
    mine = await prefill.acquire("a", tokens, "r2")
    assert mine.cached_tokens == 0
    with pytest.raises(errors.Unavailable, match="offload"):
        await decode.adopt(mine, "b")
    assert await prefill.renew(mine) == []
    await prefill.release(mine)
    await decode.release(lease)
    assert everything_back(await prefill.stats()) and manager.node.check() == []


async def two_pools(node: Node) -> tuple[BlockManager, Worker, Worker]:
    manager = await node.manager(prefill_pool="a", decode_pool="b")
    await node.mover()
    await until(lambda: manager.copies.available)
    return manager, await node.worker("prefill"), await node.worker("decode")


async def test_a_starved_sequence_preempts_the_newest_and_room_is_announced(node: Node) -> None:
    await node.manager()
    worker = await node.worker("decode")
    preempted: asyncio.Queue[Preempt] = asyncio.Queue()
    freed: asyncio.Queue[PoolFreed] = asyncio.Queue()
    await worker.bus.subscribe("decode.preempt.decode-1", receiver(preempted, Preempt))
    await worker.bus.subscribe("event.pool.freed", receiver(freed, PoolFreed))
    old, new = [
        await worker.adopt(await worker.acquire("cpu0", list(range(5 * BLOCK)), f"r{i}"), "cpu0") for i in (1, 2)
    ]
    assert len((await worker.extend(old, 20)).tables[0]) == 20
    refused = await worker.extend(old, 1)
    assert (len(refused.tables[0]), refused.victim) == (0, new.lease)
    assert (await worker.extend(old, 1)).victim == new.lease
    async with asyncio.timeout(5):
        assert (await preempted.get()).lease == new.lease
    with pytest.raises(errors.Busy) as busy:
        await worker.acquire("cpu0", [1], "r3")
    assert busy.value.retry_after_s
    assert freed.empty()
    await worker.release(new)
    async with asyncio.timeout(5):
        assert (await freed.get()).free == 6
    assert len((await worker.extend(old, 1)).tables[0]) == 1
    assert preempted.empty()  # asked once, not once per refusal


async def test_a_victim_that_did_not_hear_is_asked_again_though_nobody_starves_any_more(node: Node) -> None:
    clock = ManualClock()
    await node.manager(clock=clock)
    worker, keeper = await node.worker("decode", "decode-old"), await node.worker("decode", "decode-new")
    old = await worker.adopt(await worker.acquire("cpu0", list(range(5 * BLOCK)), "r1"), "cpu0")
    new = await keeper.adopt(await keeper.acquire("cpu0", list(range(5 * BLOCK)), "r2"), "cpu0")
    await worker.extend(old, 20)
    assert (await worker.extend(old, 1)).victim == new.lease  # its holder does not listen yet: nobody hears of it
    await worker.release(old)
    preempted: asyncio.Queue[Preempt] = asyncio.Queue()
    await keeper.bus.subscribe("decode.preempt.decode-new", receiver(preempted, Preempt))
    await clock.advance(2.0)
    async with asyncio.timeout(5):
        assert (await preempted.get()).lease == new.lease
    await keeper.release(new)
    await keeper.bus.connection.settle("decode.preempt.decode-new")  # what was sent before has arrived
    while not preempted.empty():
        preempted.get_nowait()
    await clock.advance(2.0)
    assert await keeper.acquire("cpu0", [1], "r3")
    assert preempted.empty()


async def test_a_dead_holder_gives_back_at_once_and_a_silent_one_in_time(node: Node) -> None:
    clock = ManualClock()
    manager = await node.manager(clock=clock)
    worker, admin = await node.worker("prefill"), await node.connect("admin")
    tokens = list(range(2 * BLOCK + 1))
    dead = await Worker(worker.bus, "prefill-dead").acquire("cpu0", tokens, "r1")
    silent = await worker.acquire("cpu0", tokens, "r2")
    kept = await worker.acquire("cpu0", tokens, "r3")
    await worker.commit(silent, tokens)
    gone = ActorExited(actor="prefill", instance="prefill-dead", pid=1, code=-9)
    await admin.publish("event.actor.exited", gone)
    await until(lambda: dead.lease not in manager.node.ledgers["cpu0"].leases, 5)
    assert (await worker.stats())["cpu0"].expired_leases == 1
    for _ in range(4):
        await clock.advance(3.0)
        assert await worker.renew(kept) == []
    stats = (await worker.stats())["cpu0"]
    assert (stats.expired_leases, stats.leases, stats.quarantined) == (2, 1, 1)
    assert (await worker.commit(silent, tokens)).lost == [silent.lease]
    assert await worker.renew(silent, kept) == [silent.lease]
    for _ in range(4):
        await clock.advance(3.0)
        await worker.renew(kept)
    assert (await worker.stats())["cpu0"].quarantined == 0
    await clock.advance(120.0)
    assert await worker.renew(kept) == [kept.lease]
    await clock.advance(120.0)
    assert everything_back(await worker.stats()) and manager.node.check() == []


async def test_late_and_repeated_messages_change_nothing(node: Node) -> None:
    manager = await node.manager()
    prefill, decode = await node.worker("prefill"), await node.worker("decode")
    tokens = list(range(2 * BLOCK + 1))
    lease = await prefill.acquire("cpu0", tokens)
    await decode.adopt(lease, "cpu0")
    assert (await decode.adopt(lease, "cpu0")).table == lease.table
    with pytest.raises(errors.Conflict):
        await (await node.worker("decode", "decode-2")).adopt(lease, "cpu0")
    await prefill.release(lease)  # not its any more
    assert (await prefill.commit(lease, tokens)).lost == [lease.lease]
    assert (await prefill.extend(lease, 1)).lost == [lease.lease]
    assert await prefill.renew(lease) == [lease.lease]
    assert await decode.renew(lease) == []
    for _ in range(2):
        await decode.release(lease)
    with pytest.raises(errors.Stale):
        await decode.adopt(lease, "cpu0")
    stats = (await decode.stats())["cpu0"]
    assert everything_back({"cpu0": stats}) and stats.unknown_leases >= 4
    assert manager.node.check() == []


async def test_bad_messages_are_refused_and_the_manager_goes_on(node: Node) -> None:
    await node.manager()
    worker = await node.worker("prefill")
    lease = await worker.acquire("cpu0", list(range(BLOCK)))
    good = CommitItem(lease=lease.lease, start=0, keys=b"k" * 16)
    for wrong in (good.model_copy(update={"start": 5}), good.model_copy(update={"keys": b"k" * 17})):
        with pytest.raises(errors.BadRequest):
            await worker.ask("commit", Commit(holder=worker.holder, items=[wrong, good]), Renewed)
    assert (await worker.stats())["cpu0"].active == 1  # the good one was published all the same
    with pytest.raises(errors.BadRequest):
        await worker.ask("pin", Pin(pool="cpu0", keys=b"x", ttl_s=1), Pinned)
    assert (await worker.ask("pin", Pin(pool="cpu0", keys=b"k" * 16, ttl_s=9), Pinned)).pages == 1
    assert (await worker.stats())["cpu0"].pinned == 1


def receiver(into: asyncio.Queue[M], kind: type[M]) -> Callable[[Msg], Awaitable[None]]:
    async def receive(msg: Msg) -> None:
        into.put_nowait(decode(msg.data, kind))

    return receive
