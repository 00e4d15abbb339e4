"""A pool too small for everybody: everybody finishes, with the tokens of an unhurried run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.pipeline import Pipeline, at_rest, collect, pipeline

REQUESTS = 32
NEW_TOKENS = 64
FEW = 8
"""At once in an unhurried run: of 600 pages they need at most 64."""


def bodies() -> list[dict[str, object]]:
    return [
        {
            "token_ids": [300 + 7 * number + step for step in range(20 + number)],
            "max_tokens": NEW_TOKENS,
            "sampling": {"temperature": 0.8, "seed": number, "ignore_eos": True},
        }
        for number in range(REQUESTS)
    ]


async def test_thirty_two_requests_through_a_small_pool(fp32: Pipeline, tmp_path: Path) -> None:
    async with fp32.nats() as client:
        unhurried = []
        for at in range(0, REQUESTS, FEW):
            unhurried += await asyncio.gather(*(collect(client, body) for body in bodies()[at : at + FEW]))
    # one sequence needs at most 8 pages; all of them together about 200. Admission leaves two pages and one more for
    # each that runs, but each grows by four, so on however slow a machine they meet the pool's end
    small = ("--num-blocks-override", "24", "--max-model-len", "256", "--max-num-seqs", "32")
    with pipeline(tmp_path / "small", "--dtype", "float32", *small) as tight:
        async with tight.nats() as client:
            crowd = await asyncio.gather(*(collect(client, body) for body in bodies()))
        at_rest(tight)
    for number, (expected, got) in enumerate(zip(unhurried, crowd, strict=True)):
        assert got["token_ids"] == expected["token_ids"], number
        assert got["text"] == expected["text"], number
        assert got["finish_reason"] == "length"
        assert got["usage"]["completion_tokens"] == NEW_TOKENS
    assert max(answer["attempts"] for answer in crowd) > 1, "the pool was not tight enough to preempt anybody"
