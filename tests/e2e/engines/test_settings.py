"""What the settings of workers change."""

from __future__ import annotations

import pytest

from shared import errors
from tests.support.brake import Brake
from tests.support.engines import Engines, prompt, with_options


@pytest.mark.parametrize(
    ("running", "chunks"),
    [({"max_num_batched_tokens": 16}, 5), ({"max_num_batched_tokens": 64}, 2), ({"max_num_batched_tokens": 512}, 1)],
    indirect=["running"],
)
async def test_a_prompt_is_computed_in_chunks_of_max_num_batched_tokens(running: Engines, chunks: int) -> None:
    await running.gateway.complete(running.gateway.work(prompt(80), 2))
    assert running.prefill.details()["chunks"] == chunks


@with_options(max_num_partial_prefills=2)
async def test_max_num_partial_prefills_bounds_the_prompts_at_work(
    running: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, brake = running.gateway, Brake(monkeypatch, running.prefill.engine._model)
    taken = [await gateway.send(gateway.work(prompt(30, seed), 2)) for seed in range(2)]
    refused = gateway.work(prompt(30, 2), 2)
    with pytest.raises(errors.Busy, match="2 prompts"):
        await gateway.send(refused)
    brake.release()
    for attempt in taken:
        await gateway.finish(attempt)
    await gateway.complete(refused)


@with_options(threads=1, prefill={"threads": 2})
async def test_each_worker_has_threads_of_its_own(running: Engines) -> None:
    assert (running.prefill.threads, running.decode.threads) == (2, 1)
