"""Random cancels, preemptions, repeats and expiring leases in a pool that is too small: right tokens, no page lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from shared import errors
from shared.messages import Accepted, Preempt, StartDecode
from shared.wire import decode as decode_body
from tests.support.engines import OPTIONS, Attempt, Engines, engines, prompt

REQUESTS = 30
TOKENS = 50


async def disturb(running: Engines, chance: random.Random, starts: list[StartDecode]) -> None:
    """Preempts random leases and repeats random hand-overs until cancelled."""
    bus = running.gateway.bus
    while True:
        await asyncio.sleep(chance.uniform(0.01, 0.08))
        held = [(running.decode, lease) for lease in running.decode._by_lease]
        held += [(running.prefill, job.lease.lease) for job in running.prefill._jobs.values() if job.lease is not None]
        if held and chance.random() < 0.6:
            worker, lease = chance.choice(held)
            await bus.publish(f"{worker.name}.preempt.{worker.instance}", Preempt(lease=lease))
        elif starts:
            with contextlib.suppress(errors.Busy, errors.Stale, errors.Conflict):
                await bus.request("decode.start", chance.choice(starts), Accepted, timeout_s=5)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_soak(tmp_path: Path, model: str, seed: int) -> None:
    chance = random.Random(seed)
    options = {**OPTIONS, "num_blocks_override": 40, "max_num_seqs": 6}
    async with engines(tmp_path, model=model, **options) as running:
        gateway = running.gateway
        lengths = [chance.randint(1, 90) for _ in range(REQUESTS)]
        expected = {}
        for at in range(REQUESTS):
            expected[at] = await gateway.complete(gateway.work(prompt(lengths[at], at), TOKENS))
        starts: list[StartDecode] = []

        async def overhear(msg: Any) -> None:
            starts.append(decode_body(msg.data, StartDecode))

        await gateway.bus.subscribe("decode.start", overhear)

        async def client(at: int) -> None:
            work = gateway.work(prompt(lengths[at], at), TOKENS)
            await asyncio.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.3:
                await cancelled(work, chance.randint(0, 8))
            else:
                assert await gateway.complete(work) == expected[at], at

        async def cancelled(work: Any, tokens: int) -> None:
            try:
                attempt: Attempt = await gateway.send(work)
            except errors.Busy:
                return
            while len(attempt.tokens) < tokens and not attempt.ended.is_set():
                attempt.arrived.clear()
                await asyncio.wait_for(attempt.arrived.wait(), 20)
            await gateway.cancel(attempt, running.prefill, running.decode)
            await gateway.finish(attempt)

        disturbing = asyncio.create_task(disturb(running, chance, starts))
        try:
            await asyncio.gather(*(client(at) for at in range(REQUESTS)))
        finally:
            disturbing.cancel()
        stats = await running.until_free(15)
        assert running.manager.node.check() == []
        assert stats.pools["cpu0"].expired_leases == 0
        assert not running.decode.engine.batch.rows and not running.prefill.engine._turns.all()
