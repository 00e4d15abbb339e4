"""GGUF files: weights, permutation, quantised blocks, rope scaling."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from shared.models import convert
from shared.models.convert import to_bfloat16
from shared.models.files import ModelFiles, prepare
from shared.models.gguf import GgufSource
from tests.support import tiny_models


def interleave(rows: torch.Tensor, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).numpy()


def as_gguf(model: torch.nn.Module, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny transformers model as its GGUF converter would write them."""
    renamed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {}
    for name, value in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if stem in renamed:
            tensors[f"{renamed[stem]}.{kind}"] = value.numpy()
            continue
        _, _, layer, rest = stem.split(".", 3)
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(rest, 0) if architecture == "llama" else 0
        tensors[f"blk.{layer}.{inner[rest]}.{kind}"] = interleave(value, heads) if heads else value.numpy()
    return tensors


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_both_forms_of_a_model_become_the_same(tmp_path: Path, cache: Path, architecture: str) -> None:
    model = tiny_models.folder(tmp_path / "m", architecture, rms_norm_eps=1e-5)
    path = tiny_models.gguf_file(
        tmp_path / "m.gguf",
        as_gguf(model, architecture),
        architecture=architecture,
        metadata={f"{architecture}.context_length": 128},
    )
    one, other = prepare(str(tmp_path / "m"), "float32"), prepare(str(path), "float32")
    ours, theirs = load_torch(one.weights), load_torch(other.weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    same = {**one.config.to_json(), "name": "", "rms_eps": 0}
    assert same == {**other.config.to_json(), "name": "", "rms_eps": 0}
    assert one.config.rms_eps == pytest.approx(other.config.rms_eps)
    assert one.identity != other.identity
    assert (one.eos_token_ids, one.bos_token_id) == (other.eos_token_ids, other.bos_token_id) or architecture != "llama"


def test_heads_wider_than_the_hidden_size(tmp_path: Path, cache: Path) -> None:
    """As in Qwen3: the key length says how wide a head is, and nothing says how much of it is rotated."""
    model = tiny_models.folder(tmp_path / "m", "qwen3", head_dim=32)
    path = tiny_models.gguf_file(
        tmp_path / "m.gguf",
        as_gguf(model, "qwen3"),
        architecture="qwen3",
        metadata={"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32},
        without=("qwen3.rope.dimension_count",),
    )
    files = prepare(str(path), "float32")
    assert files.config.head_dim == 32
    ours, theirs = load_torch(files.weights), load_torch(prepare(str(tmp_path / "m"), "float32").weights)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_dequantised_weights(tmp_path: Path, cache: Path, kind: str) -> None:
    tensors = tiny_models.random_tensors()
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tensors, quantisation=kind)
    files = prepare(str(path), "float32")
    ours = load_file(files.weights)

    def expected(name: str) -> np.ndarray:
        quantised = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType[kind])
        return gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])

    assert np.array_equal(ours["embed"], expected("token_embd.weight"))
    assert np.array_equal(ours["layers.1.down"], expected("blk.1.ffn_down.weight"))
    # q: 4 heads of 16; element j of the first half is row 2j of the file.
    q = expected("blk.0.attn_q.weight").reshape(4, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
    assert np.array_equal(ours["layers.0.qkv"][:64], q)
    assert np.array_equal(ours["layers.0.qkv"][96:], expected("blk.0.attn_v.weight"))
    assert (files.packed is not None) == (kind in ("Q8_0", "Q4_0", "Q4_1"))
    if files.packed:
        check_packed(files, ours)


def check_packed(files: ModelFiles, dense: dict[str, np.ndarray]) -> int:
    """Codes and scales give the dense weights back, bit for bit; returns how many tensors they cover."""
    assert files.packed
    packed = load_file(files.packed)
    names = {name.rsplit(".", 1)[0] for name in packed}
    for name in names:
        scale = packed[f"{name}.d"].astype(np.float32)[..., None]
        if f"{name}.q4" in packed:
            codes = packed[f"{name}.q4"]
            codes = np.stack((codes & 15, codes >> 4), axis=-1)
            minimum = packed[f"{name}.m"].astype(np.float32)[..., None]
        else:
            codes, minimum = packed[f"{name}.q8"], np.float32(0)
        codes = codes.reshape(*scale.shape[:2], 32).astype(np.float32)
        assert np.array_equal((codes * scale + minimum).reshape(dense[name].shape), dense[name]), name
    return len(names)


@pytest.mark.parametrize(("kind", "bytes_per_block"), [("Q4_K", 144), ("Q6_K", 210), ("Q5_K", 176)])
def test_k_quants_are_dequantised(tmp_path: Path, cache: Path, kind: str, bytes_per_block: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, bytes_per_block), dtype=np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:  # the fp16 scales must be numbers
        noise[:, at : at + 2] = np.full((64, 1), 0.01, np.float16).view(np.uint8)
    tensors = tiny_models.random_tensors(layers=1)
    for side, shape in (("gate", (256, 64)), ("up", (256, 64))):
        tensors[f"blk.0.ffn_{side}.weight"] = np.resize(tensors["token_embd.weight"], shape)
    del tensors["blk.0.ffn_down.weight"]
    raw = {"blk.0.ffn_down.weight": (noise, gguf.GGMLQuantizationType[kind])}
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tensors, raw=raw, metadata={"llama.feed_forward_length": 256})
    files = prepare(str(path), "float32")
    expected = gguf.quants.dequantize(noise, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(load_file(files.weights)["layers.0.down"], expected)
    assert files.packed is None


def test_mixed_kinds_of_one_target_stay_dense(tmp_path: Path, cache: Path) -> None:
    tensors = tiny_models.random_tensors(layers=1)
    q8 = gguf.GGMLQuantizationType.Q8_0
    raw = {"blk.0.attn_v.weight": (gguf.quants.quantize(tensors.pop("blk.0.attn_v.weight"), q8), q8)}
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tensors, quantisation="Q4_1", raw=raw)
    files = prepare(str(path), "float32")
    assert files.packed
    packed = load_file(files.packed)
    assert not [name for name in packed if name.startswith("layers.0.qkv")]
    assert check_packed(files, load_file(files.weights)) == 4  # embed, o, gate_up, down


def test_pieces_do_not_change_the_result(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.gguf_file(tmp_path / "m.gguf", tiny_models.random_tensors(), quantisation="Q4_1")
    files = prepare(str(path), "float32")
    whole = files.weights.read_bytes(), (files.directory / "packed.safetensors").read_bytes()
    monkeypatch.setattr(convert, "PIECE", 64 * 5)
    (files.directory / "manifest.json").unlink()
    said: list[tuple[str, int, int]] = []
    again = prepare(str(path), "float32", lambda *step: said.append(step))
    assert (again.weights.read_bytes(), (again.directory / "packed.safetensors").read_bytes()) == whole
    done = [step for what, *step in said if what == "converting weights"]
    assert done == sorted(done) and done[-1][0] == done[-1][1] and len(done) > 50


def test_demo_model(demo: ModelFiles) -> None:
    """Every tensor of the demo model, against gguf's own dequantisation."""
    config = demo.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.ffn_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.rope.base, config.context_length, config.tie_embeddings) == (100_000.0, 8192, True)
    assert (demo.eos_token_ids, demo.bos_token_id) == ((2,), 1)
    from shared.models.catalogue import resolve

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(resolve("smollm2-135m")).tensors}
    ours = {name: value.view(torch.int16).numpy().view(np.uint16) for name, value in load_torch(demo.weights).items()}

    def expected(name: str, heads: int = 0) -> np.ndarray:
        values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        if heads:
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        return to_bfloat16(values)

    assert len(ours) == 2 + 6 * 30
    assert np.array_equal(ours["embed"], expected("token_embd.weight"))
    assert np.array_equal(ours["norm"], expected("output_norm.weight"))
    for layer in range(30):
        block = f"blk.{layer}."
        qkv = [expected(block + f"attn_{side}.weight", heads) for side, heads in (("q", 9), ("k", 3), ("v", 0))]
        assert np.array_equal(ours[f"layers.{layer}.qkv"], np.concatenate(qkv))
        gate_up = [expected(block + f"ffn_{side}.weight") for side in ("gate", "up")]
        assert np.array_equal(ours[f"layers.{layer}.gate_up"], np.concatenate(gate_up))
        for name, theirs in {
            "o": "attn_output",
            "down": "ffn_down",
            "input_norm": "attn_norm",
            "post_norm": "ffn_norm",
        }.items():
            assert np.array_equal(ours[f"layers.{layer}.{name}"], expected(f"{block}{theirs}.weight"))


def test_rope_scaling_in_metadata(tmp_path: Path) -> None:
    tensors = tiny_models.random_tensors(layers=1)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    rope = GgufSource(tiny_models.gguf_file(tmp_path / "y.gguf", tensors, metadata=yarn)).config().rope
    assert (rope.kind, rope.factor, rope.original_context_length, rope.attention_factor) == ("yarn", 4.0, 64, None)
    factors = np.linspace(1, 8, 8).astype(np.float32)
    path = tiny_models.gguf_file(tmp_path / "f.gguf", {**tensors, "rope_freqs.weight": factors})
    source = GgufSource(path)
    assert source.config().rope.kind == "factors"
    assert source.config().rope.factors == tuple(factors.tolist())
    convert.check(source, source.config())
