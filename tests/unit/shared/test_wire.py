"""Untrusted bytes: sound ones become messages, all others a BadRequest with a path, quickly and without the value."""

from __future__ import annotations

import gc
import json
import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.errors import BadRequest, KvrelayError, TooLarge
from shared.messages import Generate, Heartbeat, Renew, Sampling, TokenBatch, TokenItem, TokenLogprob, Work


def work() -> Work:
    return Work(
        request_id="r-1",
        gateway="gateway-1",
        tokens=b"\x01\0\0\0\x02\0\0\0",
        prompt_tokens=2,
        max_tokens=5,
        sampling=Sampling(logit_bias={7: 1.5, 49_151: -100.0}, seed=2**62),
        eos_token_ids=[2],
        arrival_s=12.5,
        cache_salt=None,
    )


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_every_field_survives_both_encodings(encoding: wire.Encoding) -> None:
    batch = TokenBatch(
        worker="decode-1",
        items=[
            TokenItem(
                request_id="a",
                attempt=1,
                index=3,
                tokens=[5, 6],
                logprobs=[TokenLogprob(token_id=5, logprob=-0.5, top=[(5, -0.5), (9, -1.25)])],
                finish_reason="stop",
            )
        ],
    )
    for message in (work(), batch):
        body = wire.encode(message, encoding)
        assert wire.encoding_of(body) == encoding
        assert wire.decode(body, type(message)) == message


def test_unknown_fields_are_ignored_and_an_empty_body_has_no_fields() -> None:
    assert wire.decode(msgpack.packb({"prompt": "x", "from_the_future": [1]}), Generate).prompt == "x"
    assert wire.decode(b"", Generate) == Generate()


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"stream": 1}, "stream"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"sampling": {"logit_bias": {"x": 1.0}}}, "sampling.logit_bias.x"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"prompt": b"bytes"}, "prompt"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(body: dict, path: str) -> None:
    with pytest.raises(BadRequest, match=rf"^{path}(\.|:)"):
        wire.decode(msgpack.packb(body), Generate)


def test_json_is_held_to_the_same_types() -> None:
    with pytest.raises(BadRequest, match=r"^max_tokens:"):
        wire.decode(b'{"max_tokens": "5"}', Generate)
    with pytest.raises(BadRequest, match=r"sampling\.temperature"):
        wire.decode(b'{"sampling": {"temperature": NaN}}', Generate)


def test_an_error_never_repeats_what_the_user_wrote() -> None:
    secret = "my password is hunter2"
    for body in (msgpack.packb({"max_tokens": secret}), json.dumps({"max_tokens": secret}).encode()):
        with pytest.raises(BadRequest) as caught:
            wire.decode(body, Generate)
        assert "hunter2" not in str(caught.value)


MALFORMED = {
    "not a map": msgpack.packb([1, 2]),
    "cut short": msgpack.packb({"prompt": "x" * 100})[:50],
    "trailing bytes": msgpack.packb({}) + b"\x00",
    "repeated key": b"\x82" + 2 * (msgpack.packb("prompt") + msgpack.packb("x")),
    "repeated key in JSON": b'{"prompt": "a", "prompt": "b"}',
    "number as key": msgpack.packb({1: 2}),
    "extension type": msgpack.packb({"prompt": msgpack.ExtType(1, b"x")}),
    "timestamp": b"\x81\xa6prompt\xd6\xff\x00\x00\x00\x00",
    "bad UTF-8": b"\x81\xa6prompt\xa1\xff",
    "reserved byte": b"\xc1",
    "nested lists": b"\x81\xa6prompt" + b"\x91" * 600_000,
    "million empty maps": b"\x81\xa6prompt\xdd\x00\x01\xff\xff" + b"\x80" * 131_071,
    "a million empty lists": b"\x81\xa6prompt" + (b"\xdc\xff\xff" + b"\x90" * 65_535) * 16,
    "lists that claim to be long": b"\x81\xa6prompt" + b"\xdd\x00\x01\xff\xff" * 200_000,
    "nested JSON": b'{"prompt": ' + b"[" * 500_000,
    "many JSON maps": b'{"prompt": [' + b"{}," * 300_000 + b"{}]}",
    "JSON that is not": b"{prompt: 1}",
    "JSON number without end": b'{"max_tokens": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bodies_are_refused_within_100_ms(body: bytes) -> None:
    gc.freeze()  # what other tests left behind is not looked through on this one's account
    began = time.thread_time()
    try:
        with pytest.raises(BadRequest) as caught:
            wire.decode(body, Generate)
        assert time.thread_time() - began < 0.1
    finally:
        gc.unfreeze()
    assert len(str(caught.value)) < 300


def test_a_body_past_the_limit_is_not_even_looked_at() -> None:
    with pytest.raises(TooLarge):
        wire.decode(b"\x80" * (wire.MAX_MESSAGE_BYTES + 1), Generate)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_typed_error(body: bytes) -> None:
    try:
        wire.decode(body, Heartbeat)
    except KvrelayError as error:
        assert isinstance(error, BadRequest)


def test_none_is_left_out_of_msgpack_but_shown_in_json() -> None:
    item = TokenItem(request_id="a", attempt=0, index=0)
    assert "finish_reason" not in wire.unpack(wire.encode(item))
    assert json.loads(wire.encode(item, "json"))["finish_reason"] is None


def test_a_number_that_msgpack_does_not_have_is_a_typed_error() -> None:
    huge = Renew(holder="h", leases=[2**64])
    with pytest.raises(BadRequest, match="64 bits"):
        wire.encode(huge)
    assert wire.decode(wire.encode(huge, "json"), Renew) == huge
