"""Prefill and decode over a real block manager, NATS server and model; the test stands in for the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.engines import Engines, engines

BLOCK = 16
PROMPT = [1, 9690, 198, 2683, 359, 260, 253, 5356, 5646, 11173, 30, 2, 198, 1, 4093, 198, 504, 3575, 282, 4649]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Engines]:
    async with engines(tmp_path, num_blocks_override=256, max_num_seqs=8, threads=2, kernels="reference") as started:
        yield started


async def test_one_request_and_its_repeat(running: Engines) -> None:
    gateway = running.gateway
    first = await gateway.finish(await gateway.send(gateway.work(PROMPT * 4, 40)))
    assert len(first.tokens) == 40 and first.last.finish_reason == "length"
    assert first.items[0].cached_tokens == 0 and (first.items[0].compute_s or 0) > 0
    assert first.last.pages == -(-(len(PROMPT) * 4 + 39) // BLOCK)
    assert set(first.workers) == {running.prefill.instance, running.decode.instance}
    again = await gateway.finish(await gateway.send(gateway.work(PROMPT * 4, 40)))
    assert again.tokens == first.tokens
    assert again.items[0].cached_tokens == (len(PROMPT) * 4 - 1) // BLOCK * BLOCK
    stats = await running.until_free()
    pool = stats.pools["cpu0"]
    assert pool.cached >= (len(PROMPT) * 4 + 39) // BLOCK and pool.unknown_leases == 0
