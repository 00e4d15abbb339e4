"""A node for tests: NATS with its permissions, block manager and mover, and a worker's side of the conversation."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from infra.nats.server import NatsServer
from services.block_manager.actor import BlockManager
from services.cli.child import die_with_parent
from services.offload.actor import Offload
from shared.actor import Actor
from shared.bus import Bus
from shared.clock import SYSTEM, Clock
from shared.errors import Timeout, Unavailable
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
    Message,
    PoolDescription,
    PoolStats,
    Release,
    Renew,
    Renewed,
    Stats,
)
from shared.prefix import page_keys
from shared.settings import BlockManagerSettings, OffloadSettings

M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Actor)
BLOCK = 16


class Node:
    """A NATS server, the actors under test in this process, and a worker's connection."""

    def __init__(self, state_dir: Path, stack: contextlib.AsyncExitStack) -> None:
        self.state_dir = state_dir
        self._stack = stack
        self.server = NatsServer(state_dir, preexec=die_with_parent())

    @classmethod
    async def start(cls, state_dir: Path, stack: contextlib.AsyncExitStack) -> Node:
        """With its NATS server running; `stack` stops everything."""
        node = cls(state_dir, stack)
        await node.server.start()
        stack.push_async_callback(node.server.stop)
        return node

    async def connect(self, role: str) -> Bus:
        bus = await Bus.connect(
            self.server.url, user=role, password=self.server.credentials.roles[role].password, name=role
        )
        self._stack.push_async_callback(bus.close)
        return bus

    async def run(self, kind: type[A], settings: object, clock: Clock = SYSTEM) -> A:
        actor = kind(await self.connect(kind.name), settings, clock)
        await actor.start()
        self._stack.push_async_callback(actor.drain)
        return actor

    async def manager(self, clock: Clock = SYSTEM, **settings: object) -> BlockManager:
        return await self.run(BlockManager, BlockManagerSettings(**self.options(**settings)), clock)

    async def mover(self) -> Offload:
        return await self.run(Offload, OffloadSettings(state_dir=self.state_dir))

    def options(self, **settings: object) -> dict[str, Any]:
        return {"state_dir": self.state_dir, "num_blocks_override": 32, "max_num_seqs": 8, **settings}

    async def worker(self, role: str, holder: str | None = None) -> Worker:
        """A worker of this role; it holds its leases as `holder`, by default `<role>-1`."""
        return Worker(await self.connect(role), holder or f"{role}-1")


class Worker:
    """A worker's side of the conversation. Prompts are token ids; keys are those of the pools' own fingerprint."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self.bus, self.holder = bus, holder
        self._fingerprint = ""

    async def ask(self, verb: str, message: Message, reply: type[M], timeout_s: float = 8.0) -> M:
        return await self.bus.request(f"block_manager.{verb}", message, reply, timeout_s=timeout_s)

    async def describe(self, pool: str, fingerprint: str = "") -> PoolDescription:
        attach = Attach(holder=self.holder, pool=pool, fingerprint=fingerprint)
        description = await self.ask("attach", attach, PoolDescription)
        self._fingerprint = description.layout.fingerprint
        return description

    async def keys(self, pool: str, tokens: list[int]) -> bytes:
        if not self._fingerprint:
            await self.describe(pool)
        return page_keys(self._fingerprint, tokens, BLOCK)

    async def acquire(self, pool: str, tokens: list[int], request_id: str = "r1", timeout_s: float = 8.0) -> Lease:
        keys = await self.keys(pool, tokens)
        message = Acquire(holder=self.holder, pool=pool, request_id=request_id, keys=keys, tokens=len(tokens))
        return await self.ask("acquire", message, Lease, timeout_s)

    async def commit(self, lease: Lease, tokens: list[int]) -> Renewed:
        item = CommitItem(lease=lease.lease, start=0, keys=await self.keys(lease.table.pool, tokens))
        return await self.ask("commit", Commit(holder=self.holder, items=[item]), Renewed)

    async def extend(self, lease: Lease, pages: int) -> Extended:
        items = [ExtendItem(lease=lease.lease, pages=pages)]
        return await self.ask("extend", Extend(holder=self.holder, items=items), Extended)

    async def release(self, lease: Lease) -> None:
        """Asked again while unanswered, as workers do: a manager that is starting serves some verbs before others."""
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(Unavailable, Timeout):
                    await self.ask("release", Release(holder=self.holder, leases=[lease.lease]), Empty, 2.0)
                    return
                await asyncio.sleep(0.05)

    async def renew(self, *leases: Lease) -> list[int]:
        message = Renew(holder=self.holder, leases=[lease.lease for lease in leases])
        return (await self.ask("renew", message, Renewed)).lost

    async def adopt(self, lease: Lease, pool: str, timeout_s: float = 8.0) -> Lease:
        adopt = Adopt(lease=lease.lease, holder=self.holder, pool=pool)
        return await self.ask("adopt", adopt, Lease, timeout_s)

    async def stats(self) -> dict[str, PoolStats]:
        return (await self.ask("stats", Empty(), Stats)).pools


def everything_back(pools: dict[str, PoolStats]) -> bool:
    """Nothing is held by anybody."""
    return all(p.free + p.cached == p.total and p.tails_free == p.tails_total and not p.leases for p in pools.values())


def fill(pages: np.ndarray, table: BlockTable, seed: int) -> None:
    """Random bytes into the pages of a table."""
    rng = np.random.default_rng(seed)
    for index in unpack_u32(table.indices):
        pages[index] = rng.integers(0, 256, pages.shape[1], dtype=np.uint8)
