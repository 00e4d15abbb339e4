"""Greedy fp32 output equals `transformers`, alone, in company, and with prefill and decode in separate pools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline import Pipeline, collect, pipeline
from tests.e2e.reference import PROMPTS, judge

NEW_TOKENS = 24
POOLS = {"one pool": (), "two pools": ("--prefill-pool", "cpu0", "--decode-pool", "cpu1")}


@pytest.fixture(scope="module", params=list(POOLS))
def fp32(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    state: Path = tmp_path_factory.mktemp("fp32")
    with pipeline(state, "--dtype", "float32", "--num-blocks-override", "512", *POOLS[request.param]) as running:
        yield running


async def answers(running: Pipeline, prompts: tuple[str, ...], *, together: bool) -> list[dict[str, Any]]:
    async with running.nats() as client:
        bodies = [
            {
                "prompt": prompt,
                "max_tokens": NEW_TOKENS,
                "sampling": {"temperature": 0.0, "ignore_eos": True},
                "cache_salt": str(together),
            }
            for prompt in prompts
        ]
        if together:
            return list(await asyncio.gather(*(collect(client, body) for body in bodies)))
        return [await collect(client, body) for body in bodies]


async def test_greedy_equals_transformers_alone_and_together(fp32: Pipeline) -> None:
    alone = await answers(fp32, PROMPTS, together=False)
    together = await answers(fp32, PROMPTS, together=True)
    certain = 0
    for prompt, single, crowd in zip(PROMPTS, alone, together, strict=True):
        verdict = judge(prompt, single["token_ids"])
        certain += verdict.certain
        assert not verdict.wrong, (prompt, single["token_ids"])
        assert crowd["token_ids"] == single["token_ids"], prompt
        assert crowd["text"] == single["text"], prompt
    assert certain > len(PROMPTS) * NEW_TOKENS * 0.9, "the near-tie rule excused too much of the comparison"
