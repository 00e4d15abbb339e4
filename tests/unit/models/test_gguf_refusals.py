"""GGUF files that cannot be served: what is wrong is named, every kind of damage included."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shared.errors import Misconfigured
from shared.models import convert
from shared.models.files import prepare
from shared.models.gguf import GgufSource
from shared.models.gguf_tokenizer import build
from tests.support import tiny_models


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architecture": "gpt2"}, "'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"without": ("llama.block_count",)}, "'llama.block_count' is missing"),
        ({"metadata": {"llama.block_count": "2"}}, "'llama.block_count' must be a whole number"),
        ({"metadata": {"llama.block_count": 3}}, "blk.2.attn_k.weight, blk.2.attn_norm.weight"),
        ({"metadata": {"llama.block_count": 1}}, "unknown to 'llama'"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"metadata": {"llama.rope.scaling.type": "sinusoid"}}, "'sinusoid'"),
        ({"metadata": {"llama.attention.value_length": 32}}, "unequal size"),
        ({"metadata": {"llama.embedding_length": 32}}, "'token_embd.weight' has shape (272, 64)"),
        ({"metadata": {"split.count": 2}}, "llama-gguf-split"),
        ({"tokenizer": {}}, "'tokenizer.ggml.model' is missing"),
        ({"tokenizer": {**tiny_models.gguf_tokenizer(), "ggml.model": "bert"}}, "'bert'"),
        ({"tokenizer": {**tiny_models.gguf_tokenizer(), "ggml.pre": "martian"}}, "'martian'"),
        ({"tokenizer": {**tiny_models.gguf_tokenizer(), "ggml.merges": ["hello"]}}, "damaged merge"),
        ({"tokenizer": {**tiny_models.gguf_tokenizer(), "ggml.merges": ["x yz"]}}, "do not fit"),
        ({"tokenizer": {**tiny_models.gguf_tokenizer(), "ggml.eos_token_id": 999}}, "eos token id 999"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path: Path, cache: Path, settings: dict[str, Any], named: str) -> None:
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tiny_models.random_tensors(), **settings)
    with pytest.raises(Misconfigured) as refused:
        prepare(str(path))
    assert named in str(refused.value)


def test_unsupported_quantisation_is_named(tmp_path: Path, cache: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K
    tensors = tiny_models.random_tensors(layers=1)
    for side in ("gate", "up"):
        tensors[f"blk.0.ffn_{side}.weight"] = np.resize(tensors["token_embd.weight"], (256, 64))
    del tensors["blk.0.ffn_down.weight"]
    raw = {"blk.0.ffn_down.weight": (np.zeros((64, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)}
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tensors, raw=raw, metadata={"llama.feed_forward_length": 256})
    said: set[str] = set()
    with pytest.raises(Misconfigured, match=r"'blk\.0\.ffn_down\.weight' has unsupported quantisation Q8_K; use "):
        prepare(str(path), progress=lambda what, done, total: said.add(what))
    assert "converting weights" not in said, "nothing is converted that cannot be finished"


def test_truncated_and_foreign_files(tmp_path: Path, cache: Path) -> None:
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tiny_models.random_tensors(), quantisation="Q4_1")
    whole = path.read_bytes()
    for keep in (4, 10, 24, 500, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:keep])
        with pytest.raises(Misconfigured, match="truncated or damaged"):
            prepare(str(path))
    for content in (b"", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        with pytest.raises(Misconfigured, match="not a GGUF file"):
            prepare(str(path))


def test_damaged_headers_are_refused_or_harmless(tmp_path: Path) -> None:
    """Random bytes of the header changed: nothing but Misconfigured ever comes out."""
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tiny_models.random_tensors(layers=1), quantisation="Q4_1")
    whole, dice = path.read_bytes(), random.Random(7)
    header = int(gguf.GGUFReader(path).data_offset)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(4, header)] = dice.choice((0, 0xFF, dice.randrange(256)))
        path.write_bytes(damaged)
        try:
            source = GgufSource(path)
            convert.check(source, source.config())
            build(source.fields)
        except Misconfigured:
            refused += 1
    assert refused > 20
