"""Prefill, decode and block manager in one process over a real NATS server, with the test in the gateway's place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from infra.nats.server import NatsServer
from services.block_manager.actor import BlockManager
from services.cli.child import die_with_parent
from services.decode.actor import DecodeActor
from services.offload.actor import Offload
from services.prefill.actor import PrefillActor
from shared import wire
from shared.actor import Actor
from shared.bus import Bus
from shared.handles import pack_u32
from shared.messages import (
    Accepted,
    CancelWork,
    Empty,
    Heartbeat,
    RunPrefill,
    Sampling,
    Stats,
    TokenBatch,
    TokenItem,
    Work,
)

GATEWAY = "gateway-test"
BLOCK = 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kernels": "cpu", "threads": 1, "max_num_batched_tokens": 64, "num_blocks_override": 256,
    "max_num_seqs": 8,
}  # fmt: skip
"""Settings that suit a tiny model."""


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids in the vocabulary of a tiny model."""
    return [3 + (seed * 37 + i * i * 7 + i) % 250 for i in range(length)]


def with_options(**options: Any) -> pytest.MarkDecorator:
    """The fixture `running` with other settings; `decode={…}` for decode alone."""
    return pytest.mark.parametrize("running", [options], indirect=True, ids=[""])


@dataclass
class Attempt:
    """Everything that arrived for one attempt."""

    work: Work
    items: list[TokenItem] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [token for item in self.items for token in item.tokens]

    @property
    def last(self) -> TokenItem:
        return self.items[-1]

    @property
    def error(self) -> str | None:
        return self.last.error.kind if self.items and self.last.error is not None else None


class TestGateway:
    """Sends work and collects token items, checking that indices are contiguous."""

    __test__ = False

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.endings: list[str] = []
        self._ids = 0

    async def listen(self) -> None:
        await self.bus.subscribe(f"gateway.tokens.{GATEWAY}", self._receive)

    async def beat(self) -> None:
        """One heartbeat of a gateway."""
        await self.bus.publish("event.actor.heartbeat", Heartbeat(actor="gateway", instance=GATEWAY, pid=1, ready=True))

    async def _receive(self, msg: Msg) -> None:
        batch = wire.decode(msg.data, TokenBatch)
        for item in batch.items:
            attempt = self.attempts[item.request_id, item.attempt]
            assert not attempt.ended.is_set(), f"an item after the end: {item}"
            before = len(attempt.work.tokens) // 4 - attempt.work.prompt_tokens
            assert item.index == before + len(attempt.tokens), f"a gap or a repeat: {item}"
            attempt.items.append(item)
            attempt.workers.append(batch.worker)
            attempt.arrived.set()
            if item.finish_reason is not None or item.error is not None:
                attempt.ended.set()

    def work(self, prompt: Iterable[int], max_tokens: int, request_id: str | None = None, **options: Any) -> Work:
        self._ids += 1
        tokens = list(prompt)
        sampling = Sampling(**{"temperature": 0.0, "ignore_eos": True, **options.pop("sampling", {})})
        values = {
            "request_id": request_id or f"r{self._ids}", "gateway": GATEWAY, "tokens": pack_u32(tokens),
            "prompt_tokens": len(tokens), "max_tokens": max_tokens, "sampling": sampling, "eos_token_ids": [2],
            "arrival_s": float(self._ids), **options,
        }  # fmt: skip
        return Work(**values)

    async def send(self, work: Work) -> Attempt:
        """Places one attempt; raises what the worker says."""
        attempt = self.attempts.setdefault((work.request_id, work.attempt), Attempt(work))
        await self.bus.request("prefill.run", RunPrefill(work=work), Accepted, timeout_s=10)
        return attempt

    async def finish(self, attempt: Attempt, timeout_s: float = 60) -> Attempt:
        async with asyncio.timeout(timeout_s):
            await attempt.ended.wait()
        return attempt

    async def until(self, attempt: Attempt, tokens: int, timeout_s: float = 20) -> Attempt:
        """Waits for the first `tokens` tokens."""
        async with asyncio.timeout(timeout_s):
            while len(attempt.tokens) < tokens:
                attempt.arrived.clear()
                await attempt.arrived.wait()
        return attempt

    async def cancel(self, attempt: Attempt, *workers: Actor) -> None:
        message = CancelWork(request_id=attempt.work.request_id, attempt=attempt.work.attempt)
        for worker in workers:
            await self.bus.request(f"{worker.name}.cancel.{worker.instance}", message, Empty, timeout_s=2)

    async def complete(self, work: Work, timeout_s: float = 120) -> list[int]:
        """All tokens of a request, over as many attempts as it takes, as a gateway would run it."""
        emitted: list[int] = []
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    attempt = await self.send(work)
                except Exception as error:
                    if not getattr(error, "retryable", False):
                        raise
                    await asyncio.sleep(0.02)
                    continue
                await attempt.ended.wait()
                emitted += attempt.tokens
                if attempt.error is None:
                    assert attempt.last.finish_reason != "cancelled", attempt.last
                    return emitted
                assert attempt.error in ("Preempted", "Stale", "Unavailable"), attempt.last
                self.endings.append(attempt.error)
                tokens = work.tokens + pack_u32(attempt.tokens)
                work = work.model_copy(update={"tokens": tokens, "attempt": work.attempt + 1})


@dataclass
class Engines:
    """The running actors."""

    gateway: TestGateway
    prefill: PrefillActor
    decode: DecodeActor
    manager: BlockManager
    start: Callable[..., Awaitable[Any]]

    async def stats(self) -> Stats:
        return await self.gateway.bus.request("block_manager.stats", Empty(), Stats, timeout_s=2)

    async def until_free(self, timeout_s: float = 5) -> Stats:
        """Waits until nobody holds a page; fails if that does not come."""
        async with asyncio.timeout(timeout_s):
            while True:
                stats = await self.stats()
                if all(pool.active == pool.filling == pool.leases == 0 for pool in stats.pools.values()):
                    return stats
                await asyncio.sleep(0.02)


@asynccontextmanager
async def engines(state: Path, **options: Any) -> AsyncIterator[Engines]:
    """A NATS server, a block manager, one prefill and one decode worker.

    `options` are settings of all; a dictionary under an actor's name holds those of that actor alone.
    """
    async with AsyncExitStack() as stack:
        server = NatsServer(state, preexec=die_with_parent())
        await server.start()
        stack.push_async_callback(server.stop)

        async def connect(role: str) -> Bus:
            password = server.credentials.roles[role].password
            bus = await Bus.connect(server.url, user=role, password=password, name=role)
            stack.push_async_callback(bus.close)
            return bus

        async def start(kind: type[Actor], **changes: Any) -> Any:
            chosen = {**options, **options.get(kind.name, {}), **changes}
            known = {name: value for name, value in chosen.items() if name in kind.Settings.model_fields}
            actor = kind(await connect(kind.name), kind.Settings(state_dir=state, **known))
            await actor.start()
            stack.push_async_callback(_drain, actor)
            return actor

        gateway = TestGateway(await connect("admin"))
        await gateway.listen()
        beating = asyncio.create_task(_beat(gateway))
        stack.callback(beating.cancel)
        manager = await start(BlockManager)
        if options.get("prefill_pool") != options.get("decode_pool"):
            await start(Offload)
        yield Engines(gateway, await start(PrefillActor), await start(DecodeActor), manager, start)


async def _drain(actor: Actor) -> None:
    if not actor.draining:
        await actor.drain()


async def _beat(gateway: TestGateway) -> None:
    while True:
        await gateway.beat()
        await asyncio.sleep(1)
