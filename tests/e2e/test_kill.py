"""`kill -9` of each actor in the middle of a stream: the stream ends right, or in a typed error, within ten seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.pipeline import Pipeline, at_rest, collect, comes_true, pipeline, stream

BODY = {
    "token_ids": list(range(500, 700)),
    "max_tokens": 160,
    "sampling": {"temperature": 0.7, "seed": 11, "ignore_eos": True},
}
KILLED = ("prefill", "decode", "block_manager", "offload")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    options = ("--dtype", "float32", "--num-blocks-override", "256", "--prefill-pool", "cpu0", "--decode-pool", "cpu1")
    with pipeline(tmp_path_factory.mktemp("kill"), *options) as started:
        yield started


async def killed_in_the_middle(running: Pipeline, actor: str) -> tuple[dict[str, object] | None, float]:
    """The whole answer (or None after a typed error) and the longest silence of the stream."""
    victim = running.pids()[actor]
    token_ids: list[int] = []
    text = ""
    last: dict[str, object] = {}
    silence, heard = 0.0, time.monotonic()
    async with running.nats() as client:
        try:
            async for event in stream(client, dict(BODY), timeout_s=60):
                silence, heard = max(silence, time.monotonic() - heard), time.monotonic()
                token_ids += event.get("token_ids", [])
                text += event.get("text", "")
                last = event
                if len(token_ids) >= 10 and victim:
                    os.kill(victim, signal.SIGKILL)
                    victim = 0
        except RuntimeError:
            return None, max(silence, time.monotonic() - heard)
    assert not victim, "the stream ended before the kill"
    return {**last, "token_ids": token_ids, "text": text}, silence


@pytest.mark.parametrize("actor", KILLED)
async def test_stream_survives(running: Pipeline, actor: str) -> None:
    async with running.nats() as client:
        expected = await collect(client, dict(BODY))
    before = running.pids()
    answer, silence = await killed_in_the_middle(running, actor)
    assert silence < 10
    if answer is not None:
        assert answer["token_ids"] == expected["token_ids"]
        assert answer["text"] == expected["text"]
    await restored(running, before, actor)


async def test_gateway_is_replaced(running: Pipeline) -> None:
    async with running.nats() as client:
        expected = await collect(client, dict(BODY))
        before = running.pids()
        orphan = asyncio.ensure_future(collect(client, dict(BODY), timeout_s=20))
        os.kill(before["gateway"], signal.SIGKILL)
        await restored(running, before, "gateway")
        orphan.cancel()
        again = await collect(client, dict(BODY))
    assert again["token_ids"] == expected["token_ids"]


async def restored(running: Pipeline, before: dict[str, int], actor: str) -> None:
    """Waits until all five actors are healthy again and no page is held by the dead."""

    def claim() -> None:
        now = running.pids()
        assert set(now) == set(before) and now[actor] != before[actor], f"{before} became {now}"
        at_rest(running)

    await asyncio.to_thread(running.wait_ready, 30)
    await asyncio.to_thread(comes_true, claim, 30)
