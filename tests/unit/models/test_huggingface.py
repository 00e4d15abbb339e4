"""Hugging Face folders: configuration, mapping of weights, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import Misconfigured
from shared.models.config import ModelConfig
from shared.models.fields import Fields
from shared.models.files import prepare
from shared.models.huggingface import model_config
from tests.support import tiny_models

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
}


def read(**overrides: Any) -> ModelConfig:
    return model_config(Fields("config.json", {**PLAIN, **overrides}), "tiny")


def test_defaults_and_round_trip() -> None:
    config = read()
    assert (config.kv_heads, config.head_dim, config.tie_embeddings, config.rope.base) == (4, 16, False, 10_000.0)
    scaled = read(rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8})
    assert ModelConfig.from_json(json.loads(json.dumps(scaled.to_json()))) == scaled


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, [9, 9, 9, 9]),
        ({"model_type": "mistral", "sliding_window": None}, [0, 0, 0, 0]),
        ({"model_type": "qwen2", "sliding_window": 9}, [0, 0, 0, 0]),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, [0, 0, 0, 0]),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            [0, 0, 0, 9],
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [9, 0, 9, 0],
        ),
        ({"model_type": "llama", "sliding_window": 9}, [0, 0, 0, 0]),
    ],
)
def test_sliding_windows(settings: dict[str, Any], windows: list[int]) -> None:
    config = read(**settings)
    assert [config.window(layer) for layer in range(4)] == windows


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "../llama"}, "not supported"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' must be a whole number"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "no fit"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "'factor' must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1] * 8}},
            "8 positive numbers",
        ),
    ],
)
def test_refusals_name_the_field(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        read(**settings)
    assert named in str(refused.value)
    assert "config.json" in str(refused.value) or "supported are" in str(refused.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_mapped_whole(tmp_path: Path, cache: Path, shards: int, dtype: torch.dtype) -> None:
    model = tiny_models.folder(tmp_path / "m", "qwen3", shards=shards)
    model.to(dtype).save_pretrained(tmp_path / "m", max_shard_size="60KB" if shards > 1 else "1GB")
    files = prepare(str(tmp_path / "m"), "float32")
    ours, theirs = load_file(files.weights), {name: value.float() for name, value in model.state_dict().items()}
    block = "model.layers.1."
    joined = torch.cat([theirs[f"{block}self_attn.{side}_proj.weight"] for side in "qkv"])
    assert torch.equal(ours["layers.1.qkv"], joined)
    gate_up = torch.cat([theirs[f"{block}mlp.{side}_proj.weight"] for side in ("gate", "up")])
    assert torch.equal(ours["layers.1.gate_up"], gate_up)
    for name, original in {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "norm": "model.norm.weight",
        "layers.1.o": f"{block}self_attn.o_proj.weight",
        "layers.1.q_norm": f"{block}self_attn.q_norm.weight",
        "layers.1.k_norm": f"{block}self_attn.k_norm.weight",
        "layers.1.input_norm": f"{block}input_layernorm.weight",
        "layers.1.post_norm": f"{block}post_attention_layernorm.weight",
        "layers.1.down": f"{block}mlp.down_proj.weight",
    }.items():
        assert torch.equal(ours[name], theirs[original]), name
    assert len(ours) == 3 + 8 * 3
    assert files.packed is None


def test_conversion_rounds_as_torch_does(tmp_path: Path, cache: Path) -> None:
    model = tiny_models.folder(tmp_path / "m", "llama", tie_word_embeddings=True)
    for dtype in (torch.bfloat16, torch.float16):
        files = prepare(str(tmp_path / "m"), str(dtype).removeprefix("torch."))
        weights = load_file(files.weights)
        assert torch.equal(weights["embed"], model.state_dict()["model.embed_tokens.weight"].to(dtype))
        assert "head" not in weights


def damage(path: Path, edit: Any) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda w: w.pop("model.layers.2.mlp.down_proj.weight"), "model.layers.2.mlp.down_proj.weight is missing"),
        (lambda w: [w.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in range(3)], "are missing"),
        (lambda w: w.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}), "o_proj.bias is unknown"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(65)}), "has shape (65,), expected (64,)"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}), "unsupported type I64"),
        (lambda w: w.update({"model.norm.weight": torch.full((64,), float("nan"))}), "not finite"),
        (lambda w: w["model.norm.weight"].fill_(1e6), "does not fit float16"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, cache: Path, edit: Any, named: str) -> None:
    tiny_models.folder(tmp_path / "m", "llama")
    damage(tmp_path / "m", edit)
    with pytest.raises(Misconfigured) as refused:
        prepare(str(tmp_path / "m"), "float16")
    assert named in str(refused.value)
    assert not [entry for entry in cache.iterdir() if entry.is_dir() and entry.name != "sources"]


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights(tmp_path: Path, cache: Path, keep: int) -> None:
    tiny_models.folder(tmp_path / "m", "llama")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(Misconfigured, match=r"model\.safetensors: .*(truncated|empty|damaged)"):
        prepare(str(tmp_path / "m"))


def test_missing_files_are_named(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "m"
    tiny_models.folder(folder, "llama", shards=2)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(Misconfigured, match=shard.name):
        prepare(str(folder))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(Misconfigured, match=r"no model\.safetensors"):
        prepare(str(folder))
    tiny_models.folder(tmp_path / "n", "llama")
    (tmp_path / "n" / "tokenizer.json").write_text("{}")
    with pytest.raises(Misconfigured, match="not a tokenizer"):
        prepare(str(tmp_path / "n"))
    (tmp_path / "n" / "tokenizer.json").unlink()
    with pytest.raises(Misconfigured, match=r"tokenizer\.json is missing"):
        prepare(str(tmp_path / "n"))
    (tmp_path / "n" / "config.json").write_text("{")
    with pytest.raises(Misconfigured, match=r"config\.json: not valid JSON"):
        prepare(str(tmp_path / "n"))


def test_end_tokens_are_the_union_of_the_files(tmp_path: Path, cache: Path) -> None:
    tiny_models.folder(tmp_path / "m", "llama")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    files = prepare(str(tmp_path / "m"))
    assert files.eos_token_ids == (0, 2)
    assert files.bos_token_id == 1
    assert files.special.texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert files.chat_template == tiny_models.TEMPLATE
