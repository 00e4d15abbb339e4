"""What prefill and decode compute over a real block manager; the test stands in for the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import errors
from tests.support.engines import BLOCK, Engines, prompt, with_options


async def test_one_request_and_its_repeat(running: Engines) -> None:
    gateway = running.gateway
    first = await gateway.finish(await gateway.send(gateway.work(prompt(80), 40)))
    assert len(first.tokens) == 40 and first.last.finish_reason == "length"
    assert first.items[0].cached_tokens == 0 and (first.items[0].compute_s or 0) > 0
    assert first.last.pages == -(-(80 + 39) // BLOCK)
    assert set(first.workers) == {running.prefill.instance, running.decode.instance}
    again = await gateway.finish(await gateway.send(gateway.work(prompt(80), 40)))
    assert again.tokens == first.tokens
    assert again.items[0].cached_tokens == 64
    whole = prompt(80) + first.tokens  # the answer's pages were committed, too
    third = await gateway.finish(await gateway.send(gateway.work(whole, 2)))
    assert third.items[0].cached_tokens == 112
    pool = (await running.until_free()).pools["cpu0"]
    assert pool.unknown_leases == 0 and pool.hit_tokens == 64 + 112


async def test_lengths_around_page_borders_repeat_exactly(running: Engines) -> None:
    gateway = running.gateway
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1):
        texts = [await gateway.complete(gateway.work(prompt(length, length), 20)) for _ in range(3)]
        assert texts[0] == texts[1] == texts[2], length
        for cut in (1, 5, 19):  # a later attempt goes on where the earlier one stopped
            work = gateway.work(prompt(length, length) + texts[0][:cut], 20, prompt_tokens=length)
            assert await gateway.complete(work) == texts[0][cut:], (length, cut)


@with_options(num_blocks_override=24, max_num_seqs=8)
async def test_a_pool_too_small_for_all_preempts_and_finishes_exactly(running: Engines) -> None:
    gateway = running.gateway
    alone = [await gateway.complete(gateway.work(prompt(30 + i, i), 120, cache_salt="alone")) for i in range(12)]
    together = await asyncio.gather(
        *(gateway.complete(gateway.work(prompt(30 + i, i), 120, cache_salt="crowd")) for i in range(12))
    )
    assert list(together) == alone
    assert gateway.endings.count("Preempted") >= 2
    assert set(gateway.endings) == {"Preempted"}


@with_options(max_num_seqs=2)
async def test_sampled_results_depend_on_the_seed_alone(running: Engines) -> None:
    gateway = running.gateway

    def works() -> list[Any]:
        sampling = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.2}
        return [gateway.work(prompt(20), 30, sampling={**sampling, "seed": seed}) for seed in range(6)]

    alone = [await gateway.complete(work) for work in works()]
    assert len({tuple(tokens) for tokens in alone}) == 6
    assert list(await asyncio.gather(*(gateway.complete(work) for work in works()))) == alone


@with_options(prefill_pool="cpu0", decode_pool="cpu1")
async def test_two_pools_give_the_same_tokens_as_one(running: Engines) -> None:
    gateway = running.gateway

    def works() -> list[Any]:
        return [gateway.work(prompt(length, length), 40) for length in (1, 15, 16, 17, 100)]

    alone = [await gateway.complete(work) for work in works()]
    assert list(await asyncio.gather(*(gateway.complete(work) for work in works()))) == alone
    pools = (await running.until_free()).pools
    assert pools["cpu0"].cached > 0 and pools["cpu1"].cached > pools["cpu0"].cached


async def test_finishes(running: Engines) -> None:
    gateway = running.gateway
    plain = await gateway.complete(gateway.work(prompt(20), 12))
    only = await gateway.finish(await gateway.send(gateway.work(prompt(20), 1)))
    assert only.tokens == plain[:1] and only.last.finish_reason == "length" and only.last.pages == 2
    stopped = await gateway.finish(
        await gateway.send(gateway.work(prompt(20), 12, sampling={"stop_token_ids": [plain[4]]}))
    )
    assert stopped.last.stop_reason == plain[4] and stopped.last.finish_reason == "stop"
    assert stopped.tokens == plain[: plain.index(plain[4]) + 1]
    ended = await gateway.finish(
        await gateway.send(gateway.work(prompt(20), 12, eos_token_ids=[plain[3]], sampling={"ignore_eos": False}))
    )
    assert ended.last.stop_reason is None and ended.last.finish_reason == "stop"
    assert ended.tokens == plain[: plain.index(plain[3]) + 1]
    logprobs = await gateway.finish(await gateway.send(gateway.work(prompt(20), 3, sampling={"logprobs": 2})))
    for item in logprobs.items:
        assert item.logprobs is not None
        for logprob in item.logprobs:
            assert logprob.top[0] == (logprob.token_id, logprob.logprob) and len(logprob.top) == 2


@with_options(max_model_len=64)
async def test_the_context_limit(running: Engines) -> None:
    gateway = running.gateway
    full = await gateway.finish(await gateway.send(gateway.work(prompt(60), 100)))
    assert len(full.tokens) == 4 and full.last.finish_reason == "length"
    assert len((await gateway.finish(await gateway.send(gateway.work(prompt(63), 5)))).tokens) == 1
    for length in (64, 65, 640):
        with pytest.raises(errors.TooLarge, match="64"):
            await gateway.send(gateway.work(prompt(length), 5))
    with pytest.raises(errors.BadRequest, match="272"):
        await gateway.send(gateway.work([5, 272], 5))
