"""Tokenizers: from GGUF and from folders, against transformers and against the algorithms written out."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shared.errors import BadRequest, Misconfigured
from shared.models.catalogue import resolve
from shared.models.fields import Fields
from shared.models.files import ModelFiles, prepare
from shared.models.gguf_tokenizer import build
from shared.models.tokenizer import Tokenizer
from tests.support import tiny_models
from tests.support.sentence_piece import encode as sentence_piece_encode
from tests.support.sentence_piece import metadata as sentence_piece_metadata

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's what we'd expect, isn't it?",
    "def f(x: int) -> int:\n    return x ** 2 if x else 0  # square\n\n\tprint(f'{f(3)!r}')\r\n",
    "你好，世界！今天天气怎么样？我们去公园散步吧。",
    "emoji 👨‍👩‍👧‍👦 👩🏽‍🚀 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🇩🇪 e\u0301 é",
    "  leading, trailing and   inner spaces \n\n\n  ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "ÀÉÎõü ßœ Ω≈ç√ ∑ Привет, мир! สวัสดี नमस्ते مرحبا",
    "",
    " ",
    "\x00\x01\x7f\u200b\ufeff",
]


def test_threads_may_share_it(demo_tokenizer: Tokenizer) -> None:
    expected = [demo_tokenizer.encode(text) for text in TEXTS]

    def work(_: int) -> bool:
        ids = [demo_tokenizer.encode(text) for text in TEXTS]
        return ids == expected and all(
            demo_tokenizer.decode(row, False) == text for row, text in zip(ids, TEXTS, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_a_long_text_does_not_hold_up_other_threads(demo_tokenizer: Tokenizer) -> None:
    """While it keeps the GIL no other thread runs, and no event loop turns."""
    done = threading.Event()
    turns = 0

    def work() -> None:
        demo_tokenizer.encode("hello world " * 50_000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


MISSING = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = resolve("smollm2-135m")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_demo_tokenizer_equals_transformers(demo_tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert demo_tokenizer.decode(ids, skip_special=False) == text
    assert demo_tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_demo_tokenizer_splits_numbers_into_digits(demo_tokenizer: Tokenizer) -> None:
    """SmolLM2 never saw a token of two digits; known ids."""
    assert demo_tokenizer.encode("a 1234 b") == [81, 216, 33, 34, 35, 36, 278]
    assert demo_tokenizer.decode([81, 216, 33, 34, 35, 36, 278]) == "a 1234 b"


def test_chat_prompt_equals_transformers(demo_tokenizer: Tokenizer, theirs: Any) -> None:
    messages = [{"role": "user", "content": "Write a haiku about 🦊"}, {"role": "assistant", "content": "No."}]
    for chat in (messages[:1], messages):
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert demo_tokenizer.apply_chat_template(chat) == expected
        assert demo_tokenizer.encode_chat(chat) == theirs.encode(expected, add_special_tokens=False)


def test_special_tokens(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.special_ids == set(range(17))
    assert demo_tokenizer.id_to_piece(2) == "<|im_end|>"
    assert demo_tokenizer.token_bytes(2) == b"<|im_end|>"
    for nowhere in (49152, 2**32, -1):
        assert demo_tokenizer.id_to_piece(nowhere) == ""
        assert demo_tokenizer.decode([nowhere]) == ""


def test_text_that_is_not_unicode(demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="not valid Unicode"):
        demo_tokenizer.encode("ab\ud800c")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_every_text_survives(demo_tokenizer: Tokenizer, text: str) -> None:
    """Apart from bytes that the model's vocabulary lacks: some control characters, and unassigned planes."""
    assume(not MISSING.intersection(text.encode()))
    assert demo_tokenizer.decode(demo_tokenizer.encode(text), skip_special=False) == text


def pieces(name: str, text: str) -> list[str]:
    """How the pre-tokenizer called `name` cuts `text`."""
    fields = {**{f"tokenizer.{key}": value for key, value in tiny_models.gguf_tokenizer().items()}}
    tokenizer = build(Fields("test", {**fields, "tokenizer.ggml.pre": name}))
    assert tokenizer.pre_tokenizer
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", " DON", "'", "T", " naïve", "...", " \n\n", " x", "_", "y"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'", "T", " naïve", "...", " \n\n", " x", "_", "y"],
        ),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " DON", "'T", " naïve", "...", " \n\n", " x", "_y"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", " naïve", "...", " \n\n", " x", "_y"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", " naïve", "...", " \n\n", " x", "_y"]),
        ("default", ["It", "'", "s", " ", "123", "45", " DON", "'", "T", " naïve", "...", " \n\n", " x", "_", "y"]),
    ],
)
def test_pre_tokenizers(name: str, expected: list[str]) -> None:
    assert pieces(name, "It's 12345 DON'T naïve... \n\n x_y") == expected


def test_pre_tokenizer_names_mean_the_same() -> None:
    text = "Foo's 1234 bar"
    assert pieces("llama3", text) == pieces("llama-v3", text) == pieces("llama-bpe", text)
    assert pieces("deepseek-r1-qwen", text) == pieces("qwen2", text)


def from_gguf(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    tensors = tiny_models.random_tensors(layers=1)
    rows = len(metadata["ggml.tokens"])
    tensors["token_embd.weight"] = tensors["token_embd.weight"][[0] * rows]
    return Tokenizer.load(prepare(str(tiny_models.gguf_file(tmp_path / "t.gguf", tensors, tokenizer=metadata))))


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, cache: Path) -> None:
    plain = tiny_models.gguf_tokenizer()
    hello = from_gguf(tmp_path, plain).encode("hello")
    assert len(hello) == 1
    both = from_gguf(tmp_path, {**plain, "ggml.add_bos_token": True, "ggml.add_eos_token": True})
    assert both.encode("hello") == [1, *hello, 2]
    assert both.encode("hello", add_special=False) == hello
    assert from_gguf(tmp_path, {**plain, "ggml.pre": "llama-bpe"}).encode("hello") == [1, *hello]


def test_turn_ends_of_the_architecture_end_answers(tmp_path: Path, cache: Path) -> None:
    """A file that lists only <|endoftext|> as its end still ends at the end of a turn."""
    metadata = {**tiny_models.gguf_tokenizer(), "ggml.eos_token_id": 0}
    assert from_gguf(tmp_path, metadata).eos_token_ids == (0, 2)


def test_user_defined_tokens_are_whole_and_not_special(tmp_path: Path, cache: Path) -> None:
    metadata = tiny_models.gguf_tokenizer()
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<tool>"]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], 4]
    tokenizer = from_gguf(tmp_path, metadata)
    ids = tokenizer.encode("a<tool>b<|im_end|>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<tool>b<|im_end|>"


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("spm")
        patch.setenv("KVRELAY_CACHE_DIR", str(path / "cache"))
        return from_gguf(path, sentence_piece_metadata())


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="helo wrd\n 你é👧", max_size=30))
def test_sentence_piece_equals_its_algorithm(sentence_piece: Tokenizer, text: str) -> None:
    ids = sentence_piece.encode(text)
    assert ids == [1, *sentence_piece_encode(text)]
    assert sentence_piece.decode(ids) == text


def test_ways_to_a_piece_are_tried_in_the_order_of_their_parts() -> None:
    metadata = {"model": "llama", "tokens": ["<unk>", "abc", "ab", "bc", "a", "b", "c"], "token_type": [2, *[1] * 6],
                "scores": [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]}  # fmt: skip
    built = build(Fields("a file", {f"tokenizer.ggml.{name}": of for name, of in metadata.items()}))
    merges = json.loads(built.to_str())["model"]["merges"]
    assert merges == [["ab", "c"], ["a", "bc"], ["a", "b"], ["b", "c"]]


def test_sentence_piece_details(sentence_piece: Tokenizer) -> None:
    assert sentence_piece.decode(sentence_piece.encode(" two")) == " two"
    assert sentence_piece.encode("hello hello")[1:] == sentence_piece.encode("hello")[1:] * 2
    assert sentence_piece.token_bytes(3 + 0xE4) == b"\xe4"
    assert sentence_piece.decode([3 + 0xE4, 3 + 0xBD]) == "\ufffd"


@pytest.mark.parametrize("damage", ["{", '{"model": 1}', ""])
def test_damaged_tokenizer_file(demo: ModelFiles, tmp_path: Path, damage: str) -> None:
    import dataclasses

    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(Misconfigured, match="not a tokenizer"):
        Tokenizer.load(dataclasses.replace(demo, tokenizer=tmp_path / "tokenizer.json"))


def test_model_without_chat_template(tmp_path: Path, cache: Path) -> None:
    metadata = {key: value for key, value in tiny_models.gguf_tokenizer().items() if key != "chat_template"}
    with pytest.raises(BadRequest, match="no chat template"):
        from_gguf(tmp_path, metadata).apply_chat_template([{"role": "user", "content": "x"}])
