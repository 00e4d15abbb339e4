"""The HTTP door as OpenAI's clients see it. The workers play scripts (see `scripted.py`)."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from services.gateway.actor import Gateway
from shared import errors
from shared.handles import unpack_u32
from shared.messages import TokenLogprob, Work
from tests.e2e.scripted import CONTEXT, Stage, Worker
from tests.support.waiting import until

CHAT = {"messages": [{"role": "user", "content": "Tell me about foxes."}]}


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(on: Stage, path: str, **body: Any) -> httpx.Response:
    return await on.http.post(f"/v1/{path}", json=body)


async def events(on: Stage, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks before `[DONE]`, which must be there once, at the end."""
    text = (await post(on, path, stream=True, **body)).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_answer(on: Stage) -> None:
    reply = await post(on, "chat/completions", **CHAT, model="smollm2-135m", user="u", store=True, some_new_thing=[1])
    body = reply.json()
    assert reply.status_code == 200, body
    text = on.tokenizer.decode(on.answer)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["logprobs"]) == ("length", None)
    prompt = on.orders[0].prompt_tokens
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(on.answer),
        "total_tokens": prompt + len(on.answer),
        "cached_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["id"] == "chatcmpl-" + reply.headers["x-request-id"]
    assert reply.headers["kvrelay-trace-id"] == body["kvrelay"]["trace_id"]
    assert on.orders[0].sampling.temperature == 1.0
    assert on.orders[0].max_tokens == CONTEXT - prompt


async def test_a_chat_stream(on: Stage) -> None:
    chunks = await events(on, "chat/completions", **CHAT, stream_options={"include_usage": True})
    *choices, usage = chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert choices[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["choices"][0]["delta"] == {}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in choices[:-1])
    assert text == on.tokenizer.decode(on.answer)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(on.answer))


async def test_completions(on: Stage) -> None:
    for prompt in ("foxes", ["foxes"], on.tokenizer.encode("foxes"), [on.tokenizer.encode("foxes")]):
        body = (await post(on, "completions", prompt=prompt)).json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == on.tokenizer.decode(on.answer)
    assert {bytes(work.tokens) for work in on.orders} == {bytes(on.orders[0].tokens)}
    assert {work.max_tokens for work in on.orders} == {16}  # OpenAI's default of this API
    chunks = await events(on, "completions", prompt="foxes")
    assert chunks[-1]["choices"][0]["text"] == "" and chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == on.tokenizer.decode(on.answer)
    assert all("usage" not in chunk for chunk in chunks)


async def test_parameters_reach_the_workers(on: Stage) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [5], "seed": 3,
    }  # fmt: skip
    more = {"logit_bias": {"7": -1}, "cache_salt": "me", "priority": 2, "max_tokens": 3, "stop": "zzz"}
    assert (await post(on, "completions", prompt="a", **given, **more)).status_code == 200
    work = on.orders[-1]
    assert {name: getattr(work.sampling, name) for name in given} == given
    assert work.sampling.logit_bias == {7: -1}
    assert (work.cache_salt, work.priority, work.max_tokens) == ("me", 2, 3)
    await post(on, "chat/completions", **CHAT, max_completion_tokens=4, max_tokens=9, seed=-1, top_k=-1, stop=None)
    work = on.orders[-1]
    assert (work.max_tokens, work.sampling.seed, work.sampling.top_k) == (4, 2**63 - 1, 0)


async def test_content_as_text_parts_and_developer_role(on: Stage) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert (await post(on, "chat/completions", messages=messages)).status_code == 200
    sent = on.tokenizer.decode(unpack_u32(on.orders[0].tokens).tolist(), skip_special=False)
    assert "<|im_start|>system\nbe brief<|im_end|>" in sent and "<|im_start|>user\none two<|im_end|>" in sent


async def test_log_probabilities(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        for index, token in enumerate(on.answer[:3]):
            logprobs = [TokenLogprob(token_id=token, logprob=-0.5, top=[(token, -0.5), (5, -2.0)])]
            end: dict[str, Any] = {"finish_reason": "length"} if index == 2 else {}
            await worker.send(work, index, [token], logprobs=logprobs, **end)

    on.script = script
    body = (await post(on, "chat/completions", **CHAT, logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]).decode() for entry in content] == ["The", " quick", " brown"]
    assert content[1]["top_logprobs"][0] == {"token": " quick", "logprob": -0.5, "bytes": list(b" quick")}
    assert on.orders[0].sampling.logprobs == 2
    body = (await post(on, "completions", prompt="a", logprobs=1)).json()
    found = body["choices"][0]["logprobs"]
    assert (found["tokens"], found["text_offset"]) == (["The", " quick", " brown"], [0, 3, 9])
    assert found["token_logprobs"] == [-0.5] * 3 and found["top_logprobs"][0]["The"] == -0.5
    chunks = await events(on, "chat/completions", **CHAT, logprobs=True)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == ["The", " quick", " brown"]


REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("chat/completions", {}, 400, "messages"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ("chat/completions", {**CHAT, "n": 2}, 400, "n"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "temperature": -0.5}, 400, "temperature"),
    ("chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
    ("chat/completions", {**CHAT, "model": "gpt-17"}, 404, "model"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": 7}, 400, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, 400, "prompt"),
    ("completions", {"prompt": "a", "echo": True}, 400, "echo"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "a", "logprobs": 99}, 400, "logprobs"),
    ("completions", {"prompt": "\ud800"}, 400, None),
    ("completions", {"prompt": [5] * CONTEXT}, 400, None),
    ("nothing", {}, 404, None),
]  # fmt: skip


async def test_refused_in_openai_shape(on: Stage) -> None:
    for path, body, status, param in REFUSED:
        for streaming in (False, True):
            reply = await on.http.post(f"/v1/{path}", content=json.dumps({**body, "stream": streaming}))
            assert reply.status_code == status, (body, reply.text)
            error = reply.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), (body, error)
    for garbage in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        assert (await on.http.post("/v1/completions", content=garbage)).status_code == 400
    packed = gzip.compress(b'{"prompt": "a"}')
    refused = await on.http.post("/v1/completions", content=packed, headers={"content-encoding": "gzip"})
    assert refused.status_code == 400 and "gzip" in refused.json()["error"]["message"]
    assert (await on.http.get("/v1/completions")).status_code == 405
    too_long = await post(on, "completions", prompt=[5] * CONTEXT)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT) in too_long.json()["error"]["message"]
    assert not on.orders


async def test_a_full_queue_says_429_and_when_to_come_back(on: Stage) -> None:
    on.gateway._dispatcher.placement.queue.bound = 1
    on.refusals += [errors.Busy("full") for _ in range(500)]
    running = [asyncio.ensure_future(post(on, "completions", prompt="a"))]
    async with asyncio.timeout(10):
        while not any(one.done() for one in running):  # those just on their way to a worker are not in the queue
            running.append(asyncio.ensure_future(post(on, "completions", prompt="a")))
            await asyncio.wait(running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
    refused = next(one.result() for one in running if one.done())
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    on.refusals.clear()
    assert {reply.status_code for reply in await asyncio.gather(*running)} == {200, 429}


async def test_an_error_in_the_middle_of_a_stream_is_an_event(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, on.answer[:1])
        await asyncio.sleep(0.05)
        await worker.send(work, 1, [], error="Internal")

    on.script = script
    chunks = await events(on, "chat/completions", **CHAT)
    assert chunks[-1]["error"]["type"] == "server_error"
    assert chunks[1]["choices"][0]["delta"]["content"] == "The"


async def test_an_error_before_the_first_token_is_a_status(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.send(work, 0, [], error="Internal")

    on.script = script
    assert (await post(on, "chat/completions", **CHAT, stream=True)).status_code == 500
    assert (await post(on, "chat/completions", **CHAT)).status_code == 500


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_vanished_client_frees_its_work(on: Stage, streaming: bool, tokens: int) -> None:
    async def script(worker: Worker, work: Work) -> None:
        for index in range(tokens):
            await worker.send(work, index, on.answer[index : index + 1])

    on.script = script
    live = on.gateway._dispatcher.live
    before = _counters((await on.http.get("/metrics")).text)
    async with httpx.AsyncClient(base_url=on.http.base_url) as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a", "stream": streaming}))
        await until(lambda: live and len(next(iter(live.values())).request.emitted) == tokens)
        await until(lambda: next(iter(live.values())).request.owner)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not live)
    after = _counters((await on.http.get("/metrics")).text)
    outcome = 'kvrelay_requests_total{outcome="cancelled"}'  # as if it had asked for it
    assert after[outcome] - before.get(outcome, 0) == 1
    await asyncio.wait_for(on.prefill.told.wait(), 5)


async def test_the_timeout_header(on: Stage) -> None:
    async def script(worker: Worker, work: Work) -> None:
        await worker.told.wait()

    on.script = script
    reply = await on.http.post("/v1/completions", json={"prompt": "a"}, headers={"kvrelay-timeout-ms": "200"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")


def _counters(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_models_health_and_metrics(on: Stage) -> None:
    before = _counters((await on.http.get("/metrics")).text)
    await post(on, "chat/completions", **CHAT)
    models = (await on.http.get("/v1/models")).json()
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [("smollm2-135m", "model", CONTEXT)]
    assert (await on.http.get("/v1/models/smollm2-135m")).json() == models["data"][0]
    assert (await on.http.get("/v1/models/gpt-17")).status_code == 404
    health = (await on.http.get("/health")).json()
    assert {a["actor"] for a in health["actors"]} == {"gateway", "prefill", "decode", "block_manager", "offload"}
    after = _counters((await on.http.get("/metrics")).text)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['kvrelay_requests_total{outcome="length"}'] == 1
    assert grown["kvrelay_generation_tokens_total"] == len(on.answer)
    assert grown["kvrelay_prompt_tokens_total"] == on.orders[0].prompt_tokens
    assert grown["kvrelay_time_to_first_token_seconds_count"] == 1
    assert after['kvrelay_actors_ready{actor="decode"}'] == 1
    assert after["kvrelay_requests_running"] == after["kvrelay_requests_waiting"] == 0
    for path in ("/health", "/metrics", "/v1/models"):
        head = await on.http.head(path)
        assert (head.status_code, head.content) == (200, b"")


async def test_a_caller_s_trace_is_linked_not_joined(on: Stage) -> None:
    caller = "00-" + "a" * 32 + "-" + "b" * 16 + "-00"
    reply = await on.http.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": caller})
    trace = reply.headers["kvrelay-trace-id"]
    assert len(trace) == 32 and set(trace) != {"0"} and trace != "a" * 32


async def test_host_and_queue_are_settings(on: Stage) -> None:
    """A gateway of its own: other tests change the queue of the one that stands."""
    other: Gateway = await on.start(Gateway, http_host="127.0.0.2", http_port=0, queue_size=3)
    try:
        port = other.details()["http_port"]
        async with httpx.AsyncClient(timeout=5) as web:
            assert (await web.get(f"http://127.0.0.2:{port}/v1/models")).status_code == 200
            with pytest.raises(httpx.ConnectError):
                await web.get(f"http://127.0.0.1:{port}/v1/models")
        assert other._dispatcher.placement.queue.bound == 3
    finally:
        on.actors.remove(other)
        await other.drain()
