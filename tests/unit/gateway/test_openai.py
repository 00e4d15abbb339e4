from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.answers import Answers, error_body, status_of
from services.gateway.intake import Intake
from services.gateway.openai import ChatCompletionRequest, CompletionRequest, Refused, parse
from shared.errors import BadRequest, Busy, Internal, NotFound, TooLarge, Unavailable
from shared.messages import Generated, TokenLogprob, Usage


class Ascii:
    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(
        json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatCompletionRequest
    )


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def test_defaults_are_openai_s() -> None:
    generate = chat().generate()
    assert generate.sampling.temperature == 1.0 and generate.sampling.top_p == 1.0
    assert (generate.max_tokens, generate.stream, generate.stop) == (None, False, [])
    assert completion().generate().max_tokens == 16


def test_null_means_not_given() -> None:
    generate = chat(
        temperature=None, stop=None, max_tokens=None, logprobs=None, n=None, stream=None, seed=None
    ).generate()
    assert generate == chat().generate()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)],
)
def test_log_probabilities_of_chat(fields: dict[str, Any], wanted: int | None) -> None:
    assert chat(**fields).generate().sampling.logprobs == wanted


@pytest.mark.parametrize("value", ["x", ["x"], ["x", "y"]])
def test_stop_is_a_string_or_several(value: Any) -> None:
    assert chat(stop=value).generate().stop == ([value] if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 3}, "n"),
        ({"stop": [""]}, "stop.0"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5"),
        ({"priority": 2**40}, "priority"),
        ({"top_k": 2**64}, "top_k"),
        ({"request_id": "a b"}, "request_id"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_what_is_wrong_is_named_in_both_apis(fields: dict[str, Any], param: str) -> None:
    for make in (chat, completion):
        with pytest.raises(Refused) as refused:
            make(**fields).generate()
        assert refused.value.param == param
        assert refused.value.text.startswith(param)


TEXT_PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "", "content": "a"}], "messages.0.role"),
        ([{"role": "user", "content": "a"}, {"role": "r" * 33, "content": "a"}], "messages.1.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        (
            [{"role": "user", "content": [TEXT_PART, {"type": "image_url", "image_url": {}}]}],
            "messages.0.content.1.type",
        ),
        ([{"role": "user", "content": [TEXT_PART] * 1025}], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls"),
        ([{"role": "user", "content": "a"}] * 4097, "messages"),
        ([], "messages"),
    ],
)
def test_what_is_wrong_in_a_chat_is_named(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Intake(Ascii(), names=["m"], vocab_size=9, eos_token_ids=[], max_model_len=9).check(
            chat(messages=messages).generate()
        )
    assert error_body(refused.value)["error"]["param"] == param
    assert refused.value.text.startswith(f"{param}:")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([-1], "prompt.0"),
        ([1, "a"], "prompt.1"),
        ([True], "prompt.0"),
        ([[1, -2]], "prompt.0.1"),
    ],
)
def test_what_is_wrong_in_a_prompt_is_named(prompt: Any, param: str) -> None:
    with pytest.raises(Refused) as refused:
        completion(prompt=prompt).generate()
    assert refused.value.param == param and refused.value.text.startswith(f"{param}:")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"max_completion_tokens": 0}, "max_completion_tokens")],
)
def test_what_is_wrong_is_named_as_the_caller_named_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused, match=rf"^{param}: ") as refused:
        chat(**fields).generate()
    assert refused.value.param == param


def answer(**fields: Any) -> Generated:
    return Generated(request_id="r", trace_id="t", **fields)


def test_chunks_without_anything_to_show_are_left_out() -> None:
    answers = Answers("completions", "m", "r", 7, Ascii())
    assert answers.first() is None
    assert answers.delta(answer(token_ids=[1])) is None
    chunk = answers.delta(answer(text="a", token_ids=[97]))
    assert chunk is not None and chunk["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    ]


def test_text_offsets_go_on_over_chunks() -> None:
    answers = Answers("completions", "m", "r", 7, Ascii())
    offsets = []
    for token in (97, 98):
        chunk = answers.delta(answer(text=chr(token), logprobs=[TokenLogprob(token_id=token, logprob=-1.0)]))
        assert chunk is not None
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1]


def test_usage_has_cached_tokens_in_both_places() -> None:
    body = Answers("chat", "m", "r", 7, Ascii()).usage(Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=8))
    assert body["choices"] == []
    assert body["usage"]["cached_tokens"] == body["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert body["usage"]["total_tokens"] == 11


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (TooLarge("the prompt has 9 tokens"), 400, "invalid_request_error", None, "context_length_exceeded"),
        (TooLarge("max_tokens: 9 is more"), 400, "invalid_request_error", "max_tokens", "context_length_exceeded"),
        (NotFound("model: 'x' is not served here"), 404, "invalid_request_error", "model", "not_found"),
        (BadRequest("sampling.logit_bias: no"), 400, "invalid_request_error", "logit_bias", "bad_request"),
        (Refused("n: only 1", "n"), 400, "invalid_request_error", "n", "bad_request"),
        (Busy("full"), 429, "rate_limit_error", None, "busy"),
        (Unavailable("the gateway is starting: wait"), 503, "server_error", None, "unavailable"),
        (Internal("sorry"), 500, "server_error", None, "internal"),
    ],
)
def test_errors(error: Any, status: int, kind: str, param: str | None, code: str) -> None:
    assert status_of(error) == status
    assert error_body(error)["error"] == {"message": error.text, "type": kind, "param": param, "code": code}
