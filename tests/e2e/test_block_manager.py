"""Block manager and mover as processes see them: real NATS with its permissions, real shared memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from infra.nats.server import NatsServer
from services.block_manager.actor import BlockManager
from services.offload.actor import Offload
from shared import errors
from shared.actor import Actor
from shared.bus import Bus
from shared.handles import BlockTable, unpack_u32
from shared.messages import (
    Acquire,
    Adopt,
    Attach,
    Commit,
    CommitItem,
    Empty,
    Extend,
    Extended,
    ExtendItem,
    Lease,
    PoolDescription,
    PoolStats,
    Release,
    Renew,
    Renewed,
    Stats,
)
from shared.pool import attach
from shared.prefix import page_keys
from shared.settings import BlockManagerSettings, OffloadSettings

BLOCK = 16


class Node:
    """A NATS server, the actors under test in this process, and a worker's connection."""

    def __init__(self, state_dir: Path, stack: contextlib.AsyncExitStack) -> None:
        self.state_dir = state_dir
        self._stack = stack
        self.server = NatsServer(state_dir)

    async def connect(self, role: str) -> Bus:
        bus = await Bus.connect(
            self.server.url, user=role, password=self.server.credentials.roles[role].password, name=role
        )
        self._stack.push_async_callback(bus.close)
        return bus

    async def run(self, kind: type[Actor], settings: object) -> Actor:
        actor = kind(await self.connect(kind.name), settings)
        await actor.start()
        self._stack.push_async_callback(actor.drain)
        return actor

    async def manager(self, **settings: object) -> BlockManager:
        options = {"state_dir": self.state_dir, "num_blocks_override": 32, "max_num_seqs": 8, **settings}
        actor = await self.run(BlockManager, BlockManagerSettings(**options))  # type: ignore[arg-type]
        assert isinstance(actor, BlockManager)
        return actor

    async def mover(self) -> Offload:
        actor = await self.run(Offload, OffloadSettings(state_dir=self.state_dir))
        assert isinstance(actor, Offload)
        return actor


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with contextlib.AsyncExitStack() as stack:
        node = Node(tmp_path, stack)
        await node.server.start()
        stack.push_async_callback(node.server.stop)
        yield node


class Worker:
    """A worker's side of the conversation."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self.bus, self.holder = bus, holder

    async def ask(self, verb: str, message: object, reply: type, timeout_s: float = 5.0) -> object:
        return await self.bus.request(f"block_manager.{verb}", message, reply, timeout_s=timeout_s)  # type: ignore

    async def acquire(self, pool: str, tokens: list[int], fingerprint: str, request_id: str = "r1") -> Lease:
        keys = page_keys(fingerprint, tokens, BLOCK)
        message = Acquire(holder=self.holder, pool=pool, request_id=request_id, keys=keys, tokens=len(tokens))
        return await self.ask("acquire", message, Lease)  # type: ignore[return-value]

    async def commit(self, lease: Lease, tokens: list[int], fingerprint: str) -> Renewed:
        item = CommitItem(lease=lease.lease, start=0, keys=page_keys(fingerprint, tokens, BLOCK))
        return await self.ask("commit", Commit(holder=self.holder, items=[item]), Renewed)  # type: ignore

    async def release(self, lease: Lease) -> None:
        await self.ask("release", Release(holder=self.holder, leases=[lease.lease]), Empty)

    async def adopt(self, lease: Lease, pool: str) -> Lease:
        return await self.ask("adopt", Adopt(lease=lease.lease, holder=self.holder, pool=pool), Lease)  # type: ignore

    async def stats(self) -> dict[str, PoolStats]:
        stats = await self.ask("stats", Empty(), Stats)
        assert isinstance(stats, Stats)
        return stats.pools

    async def describe(self, pool: str, fingerprint: str = "") -> PoolDescription:
        message = Attach(holder=self.holder, pool=pool, fingerprint=fingerprint)
        return await self.ask("attach", message, PoolDescription)  # type: ignore[return-value]


def conserved(pools: dict[str, PoolStats]) -> bool:
    return all(p.free + p.filling + p.active + p.cached + p.quarantined == p.total for p in pools.values())


async def until(condition: object, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def fill(pages: np.ndarray, table: BlockTable, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for index in unpack_u32(table.indices):
        pages[index] = rng.integers(0, 256, pages.shape[1], dtype=np.uint8)


async def test_a_prompt_is_computed_once_and_found_again(node: Node) -> None:
    manager = await node.manager()
    worker = Worker(await node.connect("prefill"), "prefill-1")
    description = await worker.describe("cpu0")
    fingerprint = description.layout.fingerprint
    tokens = list(range(3 * BLOCK + 5))
    lease = await worker.acquire("cpu0", tokens, fingerprint)
    assert (len(lease.table), lease.cached_tokens) == (4, 0)
    pool = attach(description)
    pool.check(lease.table, tail=lease.tail)
    await worker.commit(lease, tokens, fingerprint)
    again = await worker.acquire("cpu0", tokens, fingerprint, "r2")
    assert again.cached_tokens == 3 * BLOCK
    assert again.table.indices[:12] == lease.table.indices[:12]
    await worker.release(lease)
    await worker.release(again)
    stats = (await worker.stats())["cpu0"]
    assert (stats.free, stats.cached, stats.leases, stats.tails_free) == (29, 3, 0, 16)
    assert (stats.prompt_tokens, stats.hit_tokens) == (2 * len(tokens), 3 * BLOCK)
    assert manager.node.check() == []
    with pytest.raises(errors.Conflict, match="fingerprint"):
        await worker.describe("cpu0", "feed")
    with pytest.raises(errors.NotFound):
        await worker.describe("cpu7")


async def test_adopting_into_another_pool_copies_pages_and_tail(node: Node) -> None:
    manager = await node.manager(prefill_pool="a", decode_pool="b")
    await node.mover()
    await until(lambda: manager.copies.available)
    prefill = Worker(await node.connect("prefill"), "prefill-1")
    decode = Worker(await node.connect("decode"), "decode-1")
    source, target = attach(await prefill.describe("a")), attach(await decode.describe("b"))
    fingerprint = manager.memory.layout.fingerprint
    tokens = list(range(5 * BLOCK + 3))
    lease = await prefill.acquire("a", tokens, fingerprint)
    fill(source.pages, lease.table, 1)
    source.tails[lease.tail.slot] = 77
    await prefill.commit(lease, tokens, fingerprint)
    adopted = await decode.adopt(lease, "b")
    assert (adopted.lease, adopted.table.pool) == (lease.lease, "b")
    target.check(adopted.table, tail=adopted.tail)
    np.testing.assert_array_equal(
        target.pages[unpack_u32(adopted.table.indices)], source.pages[unpack_u32(lease.table.indices)]
    )
    assert (target.tails[adopted.tail.slot] == 77).all()
    assert await decode.adopt(lease, "b") == adopted  # asked twice, moved once
    stats = await decode.stats()
    assert (stats["a"].leases, stats["a"].cached, stats["b"].leases, stats["b"].active) == (0, 5, 1, 5)
    await decode.release(adopted)
    assert manager.node.check() == []
    # and back: the prompt is now a hit in either pool; a longer one is computed from there on
    source.pages[:] = 0
    manager.node.ledgers["a"].pages.take(29 + 3)  # evicts everything
    manager.node.ledgers["a"].pages.drop(range(32))
    again = await prefill.acquire("a", tokens, fingerprint, "r2")
    assert again.cached_tokens == 5 * BLOCK
    np.testing.assert_array_equal(
        source.pages[unpack_u32(again.table.indices)[:5]], target.pages[unpack_u32(adopted.table.indices)[:5]]
    )
    assert (await decode.stats())["a"].hit_tokens == 5 * BLOCK
    assert manager.node.check() == []
