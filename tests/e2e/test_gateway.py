"""The gateway over a real NATS server: streams, faults, cancellation. The workers play scripts (see `scripted.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared import errors
from shared.handles import unpack_u32
from shared.messages import ActorExited, Cancel, CancelResult, Empty, Generate, Generated, ModelCard, Sampling, Work
from tests.e2e.scripted import CONTEXT, ScriptedDecode, ScriptedPrefill, Stage, Worker, stage

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("stage")) as ready:
        yield ready


@pytest.fixture
def on(running: Stage) -> Stage:
    running.reset()
    return running


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(tmp_path: Path) -> AsyncIterator[Stage]:
    """A stage of one's own, for tests that kill."""
    async with stage(tmp_path) as ready:
        yield ready


async def ask(on: Stage, timeout_s: float = 15, **fields: Any) -> Generated:
    message = Generate(**{"prompt": "Tell me about foxes.", **fields})
    return await on.client.request("gateway.generate", message, Generated, timeout_s=timeout_s)


async def stream(on: Stage, **fields: Any) -> tuple[str, list[int], Generated]:
    """Joined text and tokens, and the last event; checks what every stream must obey."""
    message = Generate(**{"prompt": "Tell me about foxes.", "stream": True, **fields})
    events = [event async for event in on.client.stream("gateway.generate", message, Generated)]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    last = events[-1]
    assert last.finish_reason is not None and not last.text and not last.token_ids
    assert {event.request_id for event in events} == {last.request_id}
    return "".join(e.text for e in events), [t for e in events for t in e.token_ids], last


async def until(condition: Any, limit_s: float = 10) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def live(on: Stage) -> int:
    return len(on.gateway._dispatcher.live)


# --- the plain life --------------------------------------------------------------------------------------------------


async def test_one_answer_and_a_stream_say_the_same(on: Stage) -> None:
    text, tokens, last = await stream(on)
    whole = await ask(on)
    assert text == whole.text == on.tokenizer.decode(on.answer)
    assert tokens == whole.token_ids == on.answer
    prompt = on.tokenizer.encode("Tell me about foxes.")
    assert last.usage is not None and last.usage.model_dump() == {
        "prompt_tokens": len(prompt), "completion_tokens": len(on.answer), "cached_tokens": 0,
    }  # fmt: skip
    assert last.actors == [on.prefill.instance, on.decode.instance]
    assert (last.finish_reason, last.pages, last.attempts, len(last.trace_id)) == ("length", 3, 1, 32)
    assert last.timings is not None and 0 < last.timings.ttft_s <= last.timings.total_s
    assert last.timings.compute_s == 0.001
    work = on.orders[0]
    assert unpack_u32(work.tokens).tolist() == prompt
    assert (work.prompt_tokens, work.max_tokens) == (len(prompt), CONTEXT - len(prompt))
    assert work.sampling.seed is not None
    assert live(on) == 0


async def test_a_character_is_never_split(on: Stage) -> None:
    on.answer = on.tokenizer.encode("日本語 👩‍🚀 naïve")
    text, tokens, _ = await stream(on)
    assert (text, tokens) == ("日本語 👩‍🚀 naïve", on.answer)
    text, _, _ = await stream(on, max_tokens=1)
    assert text == on.tokenizer.decode(on.answer[:1])


async def test_chat_uses_the_template(on: Stage) -> None:
    await ask(on, prompt=None, messages=[{"role": "user", "content": "hi"}])
    sent = on.tokenizer.decode(unpack_u32(on.orders[0].tokens).tolist(), skip_special=False)
    assert sent.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_the_model_card(on: Stage) -> None:
    card = await on.client.request("gateway.model", Empty(), ModelCard, timeout_s=2)
    assert (card.architecture, card.context_length, card.vocab_size) == ("llama", CONTEXT, 49152)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": ""}, errors.BadRequest, "empty"),
    ({"prompt": None, "token_ids": []}, errors.BadRequest, "empty"),
    ({"prompt": None, "messages": []}, errors.BadRequest, "empty"),
    ({"prompt": None}, errors.BadRequest, "none"),
    ({"token_ids": [1]}, errors.BadRequest, "exactly one"),
    ({"prompt": None, "token_ids": [49152]}, errors.BadRequest, "49152"),
    ({"sampling": Sampling(logit_bias={49152: 1.0})}, errors.BadRequest, "logit_bias"),
    ({"sampling": Sampling(stop_token_ids=[49152])}, errors.BadRequest, "stop_token_ids"),
    ({"max_tokens": 4, "sampling": Sampling(min_tokens=5)}, errors.BadRequest, "min_tokens"),
    ({"model": "gpt-17"}, errors.NotFound, "gpt-17"),
    ({"max_tokens": 10**9}, errors.TooLarge, "max_tokens"),
    ({"prompt": None, "token_ids": [5] * CONTEXT}, errors.TooLarge, "context"),
    ({"prompt": None, "token_ids": [5] * 10 * CONTEXT}, errors.TooLarge, "context"),
]


async def test_refused_at_once(on: Stage) -> None:
    for fields, kind, word in REFUSED:
        for streaming in (False, True):
            with pytest.raises(kind, match=word):
                message = Generate(**{"prompt": "a", "stream": streaming, **fields})
                async for _ in on.client.stream("gateway.generate", message, Generated, timeout_s=2):
                    pass
    assert not on.orders


async def test_the_longest_prompt_that_fits(on: Stage) -> None:
    assert len((await ask(on, prompt=None, token_ids=[5] * (CONTEXT - 1))).token_ids) == 1


# --- stop ------------------------------------------------------------------------------------------------------------


async def test_a_stop_string_over_several_tokens(on: Stage) -> None:
    on.answer = on.tokenizer.encode("one two\n\nUsed for three\n\nUser: four five six")
    text, tokens, last = await stream(on, stop=["\n\nUser:"])
    assert text == "one two\n\nUsed for three"
    assert (last.finish_reason, last.stop_reason) == ("stop", "\n\nUser:")
    assert on.tokenizer.decode(tokens).endswith("\n\nUser:")
    assert tokens == on.answer[: len(tokens)]
    assert last.usage is not None and last.usage.completion_tokens == len(tokens)


async def test_a_stop_string_ends_the_work_at_once(on: Stage) -> None:
    async def endless(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1])
        await on.decode.send(work, 1, on.answer[1:4])
        await on.decode.told.wait()

    on.script = endless
    whole = await ask(on, stop=["quick"])
    assert (whole.text, whole.token_ids) == ("The ", on.answer[:2])
    await until(lambda: (whole.request_id, 0) in on.decode.cancelled)


async def test_a_stop_token_is_counted_but_not_shown(on: Stage) -> None:
    stop_token = on.answer[3]

    async def stops(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1])
        await on.decode.send(work, 1, on.answer[1:4], finish_reason="stop", stop_reason=stop_token)

    on.script = stops
    whole = await ask(on, sampling=Sampling(stop_token_ids=[stop_token]))
    assert whole.text == on.tokenizer.decode(on.answer[:3])
    assert (whole.token_ids, whole.stop_reason, whole.finish_reason) == (on.answer[:4], stop_token, "stop")


# --- faults ----------------------------------------------------------------------------------------------------------


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
        busy = next(a for a in (on.prefill, other_prefill) if a.instance in _owners(on))
        await on.kill(busy)
    else:
        await until(lambda: when != "while decoding" or on.decode.instance in _owners(on))
        fallen, on.decode = on.decode, await on.start(ScriptedDecode)
        await on.kill(fallen)
    text, tokens, last = await asyncio.wait_for(running, 10)
    assert (text, tokens) == (on.tokenizer.decode(on.answer), on.answer)
    assert last.attempts == 2


def _owners(on: Stage) -> list[str]:
    return [name for one in on.gateway._dispatcher.live.values() for name in one.request.owners()]


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
    answers = [await ask(on) for _ in range(12)]  # chance decides which of the two is asked
    assert all(answer.token_ids == on.answer for answer in answers)
    assert any((answer.attempts or 0) > 1 for answer in answers)


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


# --- pressure --------------------------------------------------------------------------------------------------------


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
    served = [work.request_id for work in on.orders]
    assert served.index("r2") < served.index("r0")  # the urgent one went first once it was there


async def test_a_full_queue_says_429(on: Stage) -> None:
    on.gateway._dispatcher.placement.queue.bound = 2
    on.refusals += [errors.Busy("full") for _ in range(200)]
    running = [asyncio.ensure_future(ask(on)) for _ in range(2)]
    await until(lambda: live(on) == 2)
    with pytest.raises(errors.Busy) as full:
        for _ in range(3):  # one of the two may be on its way to a worker just now
            running.append(asyncio.ensure_future(ask(on)))
            await asyncio.sleep(0.02)
            for one in running:
                if one.done():
                    one.result()
    assert full.value.retry_after_s
    on.refusals.clear()
    for one in running:
        with contextlib.suppress(errors.Busy):
            await one


# --- the end before the end ------------------------------------------------------------------------------------------


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
    await until(lambda: state != "prefilling" or _owners(on))
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
