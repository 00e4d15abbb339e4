"""Pages that get another tenant while an engine computes, leases that may have run out, and attempts that come late.

A stale page that is used would answer one user with another one's context, so each check has a test of its own: the
generation changes at the worst moment, between the check before a forward pass and its end.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shared import errors
from shared.handles import unpack_u32
from shared.messages import Accepted, StartDecode
from shared.wire import decode as decode_body
from tests.support.brake import Brake
from tests.support.engines import Engines, prompt
from tests.support.waiting import until


async def test_a_prompt_whose_page_is_let_again_under_the_forward_pass(
    running: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, model = running.gateway, running.prefill.engine._model
    generations, forward = running.manager.memory.pools["cpu0"].generations, model.forward

    def re_tenant(*arguments: Any, **named: Any) -> Any:
        logits = forward(*arguments, **named)
        (job,) = running.prefill._jobs.values()
        generations[unpack_u32(job.held.table.indices)[0]] += 1
        return logits

    monkeypatch.setattr(model, "forward", re_tenant)
    attempt = await gateway.finish(await gateway.send(gateway.work(prompt(50), 5)))
    assert (attempt.error, attempt.tokens) == ("Stale", [])
    pool = (await running.until_free()).pools["cpu0"]
    assert pool.cached == 0, "a page was published that is somebody else's"


async def test_a_sequence_whose_page_is_let_again_under_a_step(
    running: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, engine = running.gateway, running.decode.engine
    generations, forward = running.manager.memory.pools["cpu0"].generations, engine._model.forward
    works = [gateway.work(prompt(40, seed), 200) for seed in range(3)]
    expected = [await gateway.complete(work.model_copy(update={"request_id": f"{work.request_id}a"})) for work in works]
    emitted: list[int] = []
    armed = threading.Event()

    def re_tenant(*arguments: Any, **named: Any) -> Any:
        logits = forward(*arguments, **named)
        if armed.is_set():
            armed.clear()
            victim = engine._sequences[works[1].request_id, 0]
            emitted.append(victim.sampler.emitted)
            generations[engine.batch.tables[victim.row, 0]] += 1
        return logits

    monkeypatch.setattr(engine._model, "forward", re_tenant)
    brake = Brake(monkeypatch, engine._model)
    # a salt each: only one sequence has the page that changes hands
    attempts = [await gateway.send(work.model_copy(update={"cache_salt": work.request_id})) for work in works]
    await until(lambda: len(running.decode._streams) == 3 and not running.decode._admissions)
    brake.allow(5)
    for attempt in attempts:
        await gateway.until(attempt, 5)
    armed.set()
    brake.release()
    for attempt in attempts:
        await gateway.finish(attempt)
    assert [attempt.error for attempt in attempts] == [None, "Stale", None]
    assert attempts[1].tokens == expected[1][: emitted[0]], "what the step computed must be thrown away"
    assert [attempts[0].tokens, attempts[2].tokens] == [expected[0], expected[2]]


@pytest.mark.parametrize("actor", ["prefill", "decode"])
async def test_nothing_is_computed_while_leases_may_have_run_out(
    running: Engines, actor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, worker = running.gateway, getattr(running, actor)
    expected = await gateway.complete(gateway.work(prompt(40), 200))
    runs: list[int] = []
    forward = worker.engine._model.forward

    def count(*arguments: Any, **named: Any) -> Any:
        runs.append(1)
        return forward(*arguments, **named)

    monkeypatch.setattr(worker.engine._model, "forward", count)
    brake = Brake(monkeypatch, running.decode.engine._model, passes=2)
    work = gateway.work(prompt(40), 200)
    attempt = None if actor == "prefill" else await gateway.until(await gateway.send(work), 3)
    monkeypatch.setattr(worker.engine, "_safe", lambda: False)
    brake.release()
    if attempt is None:
        attempt = await gateway.send(work)
        await until(lambda: [job.computing for job in running.prefill._jobs.values()] == [True])
    await worker.compute.call(len, ())  # a step that had begun is over
    before = len(runs)
    for _ in range(20):
        await worker.compute.call(len, ())  # each wakes the thread, which looks for something to do
    assert len(runs) == before and not attempt.ended.is_set()
    monkeypatch.setattr(worker.engine, "_safe", worker.keeper.safe)
    await worker.keeper.renew()
    assert (await gateway.finish(attempt)).tokens == expected


async def test_an_older_attempt_does_not_replace_a_newer_one(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, bus = running.gateway, running.gateway.bus
    starts: list[StartDecode] = []

    async def overhear(msg: Any) -> None:
        starts.append(decode_body(msg.data, StartDecode))

    await bus.subscribe("decode.start", overhear)
    brake = Brake(monkeypatch, running.decode.engine._model, passes=2)
    attempt = await gateway.until(await gateway.send(gateway.work(prompt(40), 300, attempt=1)), 3)
    late = starts[0].model_copy(update={"work": starts[0].work.model_copy(update={"attempt": 0})})
    with pytest.raises(errors.Conflict, match="later attempt"):
        await bus.request("decode.start", late, Accepted, timeout_s=2)
    brake.release()
    await gateway.finish(attempt)
    assert attempt.error is None and len(attempt.tokens) == 300
