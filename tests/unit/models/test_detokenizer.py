"""Streaming text: whole characters only, nothing lost, the joined deltas equal the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.models.files import prepare
from shared.models.tokenizer import Detokenizer, Tokenizer
from tests.support import tiny_models
from tests.support.sentence_piece import metadata as sentence_piece_metadata

FAMILY = "👨‍👩‍👧‍👦"
TEXTS = [FAMILY, "👩🏽‍🚀🏴󠁧󠁢󠁳󠁣󠁴󠁿🇩🇪", "你好，世界！𠮷", "plain text", "e\u0301 é ü", f"a{FAMILY}你b\n", " leading space"]


@pytest.fixture(scope="module", params=["byte-level", "sentence-piece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One of each kind, without merges that would hide the bytes."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    metadata = tiny_models.gguf_tokenizer() if request.param == "byte-level" else sentence_piece_metadata()
    tensors = tiny_models.random_tensors(layers=1)
    tensors["token_embd.weight"] = tensors["token_embd.weight"][[0] * len(metadata["ggml.tokens"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_CACHE_DIR", str(path / "cache"))
        return Tokenizer.load(prepare(str(tiny_models.gguf_file(path / "t.gguf", tensors, tokenizer=metadata))))


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """byte → the token that is this byte alone."""
    found = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return {byte: found[bytes([byte])] for byte in range(256) if bytes([byte]) in found}


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, step: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt or ())
    deltas = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_characters_are_never_split(tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = tokenizer.encode(text, add_special=False)
    deltas = stream(tokenizer, ids, step=step)
    assert "".join(deltas) == text == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(deltas)
    assert deltas[-1] == ""


def test_end_inside_a_character(tokenizer: Tokenizer) -> None:
    """Cut after every byte of 你: nothing until the end, then one replacement character."""
    of = byte_tokens(tokenizer)
    ids = [of[byte] for byte in "a你".encode()]
    for cut in (2, 3):
        assert stream(tokenizer, ids[:cut]) == ["a", *[""] * (cut - 1), "\ufffd"]
        assert tokenizer.decode(ids[:cut]) == "a\ufffd"
    assert stream(tokenizer, ids) == ["a", "", "", "你", ""]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24), step=st.integers(1, 4))
def test_all_byte_sequences(tokenizer: Tokenizer, data: bytes, step: int) -> None:
    of = byte_tokens(tokenizer)
    data = bytes(byte for byte in data if byte in of)
    ids = [of[byte] for byte in data]
    expected = data.removeprefix(b" ") if tokenizer.strips_first_space else data
    assert "".join(stream(tokenizer, ids, step=step)) == tokenizer.decode(ids) == expected.decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_of_the_demo_model(demo_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, demo_tokenizer.vocab_size + 5), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, rest = ids[:cut], ids[cut:]
    assert "".join(stream(demo_tokenizer, rest)) == demo_tokenizer.decode(rest)
    continued = "".join(stream(demo_tokenizer, rest, prompt))
    known = Detokenizer(demo_tokenizer).push(prompt)  # whole characters of the prompt
    assert known + continued == demo_tokenizer.decode(ids)


def test_valid_text_decodes_as_the_tokenizers_package_does(demo_tokenizer: Tokenizer) -> None:
    backend = demo_tokenizer._backend
    for text in TEXTS:
        ids = demo_tokenizer.encode(text)
        assert demo_tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_prompt_decides_about_a_leading_space(tokenizer: Tokenizer) -> None:
    """A sentence-piece word carries its space; it counts unless the word begins the text."""
    prompt, ids = tokenizer.encode("hello"), tokenizer.encode("hello world", add_special=False)
    rest = ids[len(tokenizer.encode("hello", add_special=False)) :]
    assert "".join(stream(tokenizer, rest, prompt)) == " world"
    alone = "".join(stream(tokenizer, rest))
    assert alone == ("world" if tokenizer.strips_first_space else " world") == tokenizer.decode(rest)
    begin = [1] if tokenizer.strips_first_space else []  # BOS alone is no text yet
    assert "".join(stream(tokenizer, rest, begin)) == alone


def test_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    of = byte_tokens(tokenizer)
    ids = [of[byte] for byte in "a👧b".encode()]
    for cut in range(2, 5):
        assert stream(tokenizer, ids[cut:], ids[:cut]) == [*[""] * (4 - cut), "👧", "b", ""]


def test_special_tokens_are_left_out_or_shown(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello", add_special=False)
    ids = [*hello, 2]
    assert "".join(stream(tokenizer, ids)) == "hello"
    shown = Detokenizer(tokenizer, skip_special=False)
    assert shown.push(ids) + shown.finish() == "hello" + tokenizer.id_to_piece(2)


def test_special_token_inside_a_character(demo_tokenizer: Tokenizer) -> None:
    of = byte_tokens(demo_tokenizer)
    ids = [of[0xE4], 2, of[0xBD], of[0xA0]]
    assert "".join(stream(demo_tokenizer, ids)) == "你" == demo_tokenizer.decode(ids)
    assert "".join(stream(demo_tokenizer, ids[3:], ids[:3])) == "你"
