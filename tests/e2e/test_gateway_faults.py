"""Lost, repeated and late messages, dying workers, a full pool: what the client sees. The workers play scripts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from shared import errors
from shared.handles import unpack_u32
from shared.messages import ActorExited, Sampling, Work
from tests.e2e.scripted import (
    ScriptedDecode,
    ScriptedPrefill,
    Stage,
    Worker,
    ask,
    client_id,
    live,
    owners,
    stream,
)
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- faults ---


async def test_repeats_gaps_and_late_messages_do_not_show(on: Stage) -> None:
    async def sloppy(worker: Worker, work: Work) -> None:
        if work.attempt == 0:
            await worker.send(work, 0, on.answer[:1])
            await worker.send(work, 0, on.answer[:1])
            await on.decode.send(work, 1, on.answer[1:3])
            await on.decode.send(work, 1, on.answer[1:4])  # overlaps
            await on.decode.send(work, 6, on.answer[6:7])  # 4 and 5 were lost
            await on.decode.send(work, 7, on.answer[7:8])
            return
        old = work.model_copy(update={"attempt": 0})
        await on.decode.send(old, 4, [1, 2, 3])
        await on.play(worker, work)
        await on.decode.send(old, 4, [1, 2, 3])

    on.script = sloppy
    text, tokens, last = await stream(on)
    assert (text, tokens) == (on.tokenizer.decode(on.answer), on.answer)
    assert last.attempts == 2
    assert [len(unpack_u32(work.tokens)) - work.prompt_tokens for work in on.orders] == [0, 4]
    assert (last.request_id, 0) in on.decode.cancelled


@pytest.mark.parametrize("kind", ["Stale", "Unavailable", "Timeout", "Preempted"])
async def test_the_next_attempt_goes_on_where_the_stream_was(on: Stage, kind: str) -> None:
    async def fails(worker: Worker, work: Work) -> None:
        done = len(unpack_u32(work.tokens)) - work.prompt_tokens
        if work.attempt < 3:
            await worker.send(work, done, on.answer[done : done + 1])
            await on.decode.send(work, done + 1, on.answer[done + 1 : done + 2], error=kind)
        else:
            await on.play(worker, work)

    on.script = fails
    text, tokens, last = await stream(on, stop=["lazy"], sampling=Sampling(temperature=0.5))
    assert text == on.tokenizer.decode(on.answer).partition("lazy")[0]
    assert tokens == on.answer[: len(tokens)]
    assert last.attempts == 4
    assert {work.sampling.seed for work in on.orders} == {on.orders[0].sampling.seed}
    assert {work.arrival_s for work in on.orders} == {on.orders[0].arrival_s}


async def test_an_error_that_no_retry_can_mend_ends_the_request(on: Stage) -> None:
    async def fails(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1], error="TooLarge")

    on.script = fails
    with pytest.raises(errors.TooLarge, match="scripted"):
        await ask(on)
    assert live(on) == 0


async def test_faults_without_end_are_given_up(on: Stage) -> None:
    async def fails(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, [], error="Stale")

    on.script = fails
    with pytest.raises(errors.Stale):
        await ask(on)
    assert 2 <= len(on.orders) <= 16


@pytest.mark.parametrize("when", ["before a token", "in the hand-over", "while decoding"])
async def test_a_worker_dies(fresh: Stage, when: str) -> None:
    on = fresh
    reached = asyncio.Event()

    async def script(worker: Worker, work: Work) -> None:
        if work.attempt > 0:
            await on.play(worker, work)
            return
        if when != "before a token":
            await worker.send(work, 0, on.answer[:1])
        if when == "while decoding":
            await on.decode.send(work, 1, on.answer[1:3])
        reached.set()

    on.script = script
    other_prefill = await on.start(ScriptedPrefill)
    running = asyncio.ensure_future(stream(on))
    await reached.wait()
    await until(lambda: any(one.request.state.name == "RUNNING" for one in on.gateway._dispatcher.live.values()))
    if when == "before a token":
        busy = next(a for a in (on.prefill, other_prefill) if a.instance in owners(on))
        await on.kill(busy)
    else:
        await until(lambda: when != "while decoding" or on.decode.instance in owners(on))
        fallen, on.decode = on.decode, await on.start(ScriptedDecode)
        await on.kill(fallen)
    text, tokens, last = await asyncio.wait_for(running, 10)
    assert (text, tokens) == (on.tokenizer.decode(on.answer), on.answer)
    assert last.attempts == 2


async def test_a_worker_falls_silent(fresh: Stage) -> None:
    on = fresh

    async def script(worker: Worker, work: Work) -> None:
        if work.attempt == 0:
            await worker.send(work, 0, on.answer[:1])
            fallen, on.decode = on.decode, await on.start(ScriptedDecode)
            await fallen.send(work, 1, on.answer[1:3])
            await on.kill(fallen, seen=False)
        else:
            await on.play(worker, work)

    on.script = script
    began = asyncio.get_running_loop().time()
    _, tokens, last = await stream(on)
    assert (tokens, last.attempts) == (on.answer, 2)
    assert asyncio.get_running_loop().time() - began < 10


async def test_an_answer_that_was_lost_whole_is_missed(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        if work.attempt > 0:
            await on.play(worker, work)

    on.script = script
    on.prefill.report = {"running": 0, "waiting": 0}  # it believes to have sent everything
    answer = await ask(on)
    assert (answer.token_ids, answer.attempts) == (on.answer, 2)


async def test_a_worker_that_died_while_it_accepted(fresh: Stage) -> None:
    on, fallen = fresh, fresh.prefill

    async def script(worker: Worker, work: Work) -> None:
        if worker is not fallen:
            await on.play(worker, work)

    on.script = script
    await on.start(ScriptedPrefill)
    await until(lambda: len(on.gateway._watch.ready("prefill")) == 2)
    on.gateway._watch.exited(ActorExited(actor="prefill", instance=fallen.instance, pid=1, code=-9))
    attempts = 1
    for _ in range(50):  # chance decides which of the two is asked
        answer = await ask(on)
        assert answer.token_ids == on.answer
        attempts = answer.attempts or 0
        if attempts > 1:
            break
    assert attempts > 1


async def test_without_a_worker_there_is_a_typed_error_in_time(fresh: Stage) -> None:
    on = fresh
    await on.kill(on.decode)
    await until(lambda: on.gateway._watch.missing() == ["decode"])
    began = asyncio.get_running_loop().time()
    with pytest.raises(errors.Unavailable, match="decode"):
        await ask(on)
    assert asyncio.get_running_loop().time() - began < 10
    assert not on.orders
    answer = await on.http.get("/health")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["decode"])


async def test_a_request_waits_for_a_worker_that_comes_back(fresh: Stage) -> None:
    on = fresh
    await on.kill(on.decode)
    await until(lambda: on.gateway._watch.missing() == ["decode"])
    running = asyncio.ensure_future(ask(on))
    await until(lambda: live(on) == 1)
    on.decode = await on.start(ScriptedDecode)
    assert (await running).token_ids == on.answer


async def test_nats_restarts_in_the_middle_of_an_answer(fresh: Stage) -> None:
    on = fresh

    async def script(worker: Worker, work: Work) -> None:
        if work.attempt == 0:
            await worker.send(work, 0, on.answer[:1])  # and the rest is lost with the server
            first.set()
        else:
            await on.play(worker, work)

    first = asyncio.Event()
    on.script = script
    async with on.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 12}
    ) as reply:
        await first.wait()
        await on.nats.stop()
        await on.nats.start()
        body = "".join([chunk async for chunk in reply.aiter_text()])
    assert body.endswith("data: [DONE]\n\n") and '"error"' not in body
    assert "lazy" in body


# --- pressure ---


async def test_busy_workers_are_asked_again_in_order(on: Stage) -> None:
    on.refusals += [errors.Busy("full") for _ in range(5)]
    assert (await ask(on)).token_ids == on.answer
    assert len(on.orders) == 6
    on.orders.clear()
    on.refusals += [errors.Busy("full") for _ in range(3)]
    first = asyncio.ensure_future(ask(on, request_id="first"))
    await until(lambda: on.orders)
    others = [asyncio.ensure_future(ask(on, request_id=f"r{n}", priority=-n)) for n in range(3)]
    await asyncio.gather(first, *others)
    served = [client_id(work.request_id) for work in on.orders]
    assert served.index("r2") < served.index("r0")  # the urgent one went first once it was there


async def test_a_full_queue_says_429(on: Stage) -> None:
    on.gateway._dispatcher.placement.queue.bound = 2
    on.refusals += [errors.Busy("full") for _ in range(200)]
    running = [asyncio.ensure_future(ask(on)) for _ in range(2)]
    await until(lambda: live(on) == 2)
    async with asyncio.timeout(10):
        while not any(one.done() for one in running):  # those just on their way to a worker are not in the queue
            running.append(asyncio.ensure_future(ask(on)))
            await asyncio.wait(running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    full = next(one.exception() for one in running if one.done())
    assert isinstance(full, errors.Busy) and full.retry_after_s
    on.refusals.clear()
    for one in running:
        with contextlib.suppress(errors.Busy):
            await one
