"""The load generator: what it makes of the bytes of streams, and of streams that overlap."""

from __future__ import annotations

import json

import pytest

from infra.bench.http_load import Stream, reduce, seen


def line(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'


def test_an_event_arrives_when_its_line_is_complete() -> None:
    first, second = line("a"), line("b")
    stream = seen(0.5, [(1.0, first + second[:9]), (2.0, second[9:] + line("") + line("c")), (3.0, USAGE)])
    assert (stream.started, stream.arrivals) == (0.5, [1.0, 2.0, 2.0])
    assert (stream.prompt_tokens, stream.completion_tokens) == (7, 4)


def test_without_usage_every_event_is_a_token() -> None:
    assert seen(0.0, [(1.0, line("a")), (2.0, line("b"))]).completion_tokens == 2


def test_a_stream_without_text_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no token"):
        seen(0.0, [(1.0, line("") + USAGE)])


def test_decode_is_counted_while_all_streams_decode() -> None:
    fresh = [Stream(0.0, 100, 1, [2.0]), Stream(0.0, 300, 1, [4.0])]
    cached = [Stream(5.0, 100, 4, [6.0, 7.0, 8.0, 9.0]), Stream(5.0, 300, 4, [7.0, 8.0, 9.0, 10.0])]
    figures = reduce(fresh, cached)
    # from 7 to 9: two tokens of each
    assert (figures.decode_tok_s, figures.prefill_tok_s, figures.ttft_s) == (2.0, 100.0, 2.0)
    assert (figures.prompt_tokens, figures.completion_tokens) == (400, 8)


def test_streams_that_never_decode_together_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="more new tokens"):
        reduce([Stream(0.0, 1, 1, [1.0])], [Stream(0.0, 1, 1, [1.0]), Stream(0.0, 1, 1, [2.0])])
