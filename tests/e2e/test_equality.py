"""Greedy fp32 output equals `transformers`, alone, in company, and with prefill and decode in separate pools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.pipeline import Pipeline, collect, pipeline
from tests.e2e.reference import PROMPTS, judge

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    options = ("--dtype", "float32", "--num-blocks-override", "512", "--prefill-pool", "cpu0", "--decode-pool", "cpu1")
    with pipeline(tmp_path_factory.mktemp("two-pools"), *options) as running:
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


@pytest.mark.parametrize("pools", ["fp32", "two_pools"])
async def test_greedy_equals_transformers_alone_and_together(request: pytest.FixtureRequest, pools: str) -> None:
    running: Pipeline = request.getfixturevalue(pools)
    alone = await answers(running, PROMPTS, together=False)
    together = await answers(running, PROMPTS, together=True)
    certain = 0
    for prompt, single, crowd in zip(PROMPTS, alone, together, strict=True):
        verdict = judge(prompt, tuple(single["token_ids"]))
        certain += verdict.certain
        assert not verdict.wrong, (prompt, single["token_ids"])
        assert crowd["token_ids"] == single["token_ids"], prompt
        assert crowd["text"] == single["text"], prompt
    assert certain > len(PROMPTS) * NEW_TOKENS * 0.9, "the near-tie rule excused too much of the comparison"
