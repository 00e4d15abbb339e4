"""Cancelled, vanished, late: a request ends once and frees what it holds. The workers play scripts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from shared import errors
from shared.messages import Cancel, CancelResult, Generate, Generated, Work
from tests.e2e.scripted import Stage, Worker, ask, live, owners, stream
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def _cancel(on: Stage, request_id: str) -> bool:
    answer = await on.client.request("gateway.cancel", Cancel(request_id=request_id), CancelResult, timeout_s=2)
    return answer.found


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "preempted"])
async def test_cancel_in_every_state(on: Stage, state: str) -> None:
    async def script(worker: Worker, work: Work) -> None:
        if state in ("decoding", "preempted"):
            await worker.send(work, 0, on.answer[:1])
            await on.decode.send(work, 1, on.answer[1:2], error="Preempted" if state == "preempted" else "")
            on.refusals += [errors.Busy("full") for _ in range(500 if state == "preempted" else 0)]

    on.script = script
    on.refusals += [errors.Busy("full") for _ in range(500 if state == "queued" else 0)]
    running = asyncio.ensure_future(stream(on, request_id="r"))
    wanted = {"queued": 0, "prefilling": 0, "decoding": 2, "preempted": 2}[state]
    await until(lambda: on.orders and live(on) and len(on.gateway._dispatcher.live["r"].request.emitted) == wanted)
    await until(lambda: state != "prefilling" or owners(on))
    assert await _cancel(on, "r")
    _, tokens, last = await asyncio.wait_for(running, 5)
    assert (last.finish_reason, tokens) == ("cancelled", on.answer[:wanted])
    assert not await _cancel(on, "r")
    assert not await _cancel(on, "nobody")
    assert live(on) == 0
    if state == "prefilling":
        await until(lambda: ("r", 0) in on.prefill.cancelled)
    if state == "decoding":
        await until(lambda: ("r", 0) in on.decode.cancelled)


async def test_a_vanished_stream_client_frees_its_work(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1])
        await on.decode.send(work, 1, on.answer[1:2])
        await on.decode.told.wait()

    on.script = script
    message = Generate(prompt="a", stream=True)
    async with contextlib.aclosing(on.client.stream("gateway.generate", message, Generated)) as events:
        async for _ in events:
            break
    await asyncio.wait_for(on.decode.told.wait(), 5)
    await until(lambda: live(on) == 0)


async def test_a_worker_that_goes_on_is_told_again(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1])
        await until(lambda: live(on) == 0)
        on.decode.told.clear()
        await on.decode.send(work, 1, on.answer[1:2])

    on.script = script
    running = asyncio.ensure_future(stream(on, request_id="r"))
    await until(lambda: live(on) and on.gateway._dispatcher.live["r"].request.emitted)
    await _cancel(on, "r")
    await running
    await asyncio.wait_for(on.decode.told.wait(), 5)
    assert on.decode.cancelled.count(("r", 0)) == 1


async def test_the_deadline_ends_it_everywhere(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1])

    on.script = script
    with pytest.raises(errors.Timeout, match=r"0\.3 s"):
        await stream(on, timeout_s=0.3)
    await until(lambda: on.prefill.cancelled)
    assert live(on) == 0


async def test_an_id_in_use_is_refused(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.told.wait()

    on.script = script
    running = asyncio.ensure_future(ask(on, request_id="r"))
    await until(lambda: live(on) == 1)
    with pytest.raises(errors.Conflict, match="request_id"):
        await ask(on, request_id="r")
    await _cancel(on, "r")
    assert (await running).finish_reason == "cancelled"


async def test_an_id_used_again_names_another_request(on: Stage) -> None:
    """Workers remember what they were told to drop, and its tokens may be on their way still."""
    accepted, late = asyncio.Event(), asyncio.Event()

    async def script(worker: Worker, work: Work) -> None:
        if work is on.orders[0]:
            await accepted.wait()
            await worker.send(work, 0, [1, 2, 3])
            late.set()
        else:
            accepted.set()
            await late.wait()
            await on.play(worker, work)

    on.script = script
    running = asyncio.ensure_future(ask(on, request_id="r"))
    await until(lambda: owners(on))
    assert await _cancel(on, "r")
    await running
    text, tokens, last = await stream(on, request_id="r")
    assert (text, tokens) == (on.tokenizer.decode(on.answer), on.answer)
    assert (last.request_id, last.attempts) == ("r", 1)
    assert len({(work.request_id, work.attempt) for work in on.orders}) == 2
    longest = "x" * 128
    assert (await ask(on, request_id=longest)).request_id == longest


async def test_drain_answers_what_was_accepted(fresh: Stage) -> None:
    on = fresh
    go = asyncio.Event()

    async def script(worker: Worker, work: Work) -> None:
        await go.wait()
        await on.play(worker, work)

    on.script = script
    running = [asyncio.ensure_future(ask(on)) for _ in range(20)]
    running += [asyncio.ensure_future(on.http.post("/v1/completions", json={"prompt": "a"})) for _ in range(20)]  # type: ignore[list-item]
    await until(lambda: live(on) == 40)
    on.actors.remove(on.gateway)
    draining = asyncio.ensure_future(on.gateway.drain())
    await until(lambda: on.gateway.draining)
    assert (await on.http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
    go.set()
    answers = await asyncio.gather(*running)
    assert all(answer.token_ids == on.answer for answer in answers[:20])
    assert {answer.status_code for answer in answers[20:]} == {200}  # type: ignore[attr-defined]
    await draining
