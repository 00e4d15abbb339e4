"""Answers, streams, refusals and stop strings over a real NATS server. The workers play scripts (see `scripted.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from shared import errors
from shared.handles import unpack_u32
from shared.messages import Empty, Generate, Generated, ModelCard, Sampling, Work
from tests.e2e.scripted import CONTEXT, Stage, Worker, ask, live, stream
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- the plain life ---


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


# --- stop ---


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
