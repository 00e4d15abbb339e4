"""Models small enough to make in a test, in both forms in which models come: Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġ Ġ")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 272


def byte_level_vocabulary() -> list[str]:
    """Special tokens, the 256 bytes, and the results of `MERGES`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def byte_level_tokenizer() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(byte_level_vocabulary())}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def folder(path: Path, architecture: str, *, seed: int = 0, shards: int = 1, **overrides: Any) -> torch.nn.Module:
    """Saves a random model of `architecture` (fp32) with tokenizer and chat template at `path`; returns it.

    Weights are large enough that attention is not flat, and every bias and norm differs from its initial value.
    """
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attn_implementation": "eager",
        **overrides,
    }
    config = transformers.AutoConfig.for_model(architecture, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(path, max_shard_size=size // shards + 1024 if shards > 1 else "5GB")
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    return model


def random_tensors(layers: int = 2, seed: int = 0, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """float32 tensors of a small decoder under their GGUF names; q and k rows already in the file's order."""
    random = np.random.default_rng(seed)
    hidden, ffn, q_rows, kv_rows = 64, 96, 64, 32

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.2).astype(np.float32)

    tensors = {"token_embd.weight": matrix(VOCABULARY, hidden), "output_norm.weight": matrix(hidden)}
    for layer in range(layers):
        shapes = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q_rows, hidden),
            "attn_k.weight": (kv_rows, hidden),
            "attn_v.weight": (kv_rows, hidden),
            "attn_output.weight": (hidden, q_rows),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }
        if architecture == "qwen2":
            shapes |= {f"attn_{side}.bias": (rows,) for side, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))}
        tensors |= {f"blk.{layer}.{name}": matrix(*shape) for name, shape in shapes.items()}
    return tensors


def gguf_file(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    quantisation: str = "F32",
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    tokenizer: dict[str, Any] | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Writes a GGUF file. Matrices take `quantisation` (a GGUF type name), vectors F32; `raw` is written as it is."""
    writer = gguf.GGUFWriter(path, architecture)
    layers = sum(name.endswith("attn_norm.weight") for name in tensors)
    numbers: dict[str, Any] = {
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.rope.dimension_count": 16,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        **(metadata or {}),
    }
    for key, value in numbers.items():
        if key in without:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for key, value in (tokenizer if tokenizer is not None else gguf_tokenizer()).items():
        add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        add(f"tokenizer.{key}", value)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or quantisation == "F32":
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    for name, (blocks, block_kind) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=block_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tokenizer() -> dict[str, Any]:
    """Metadata of the tokenizer of `byte_level_tokenizer`."""
    vocabulary = byte_level_vocabulary()
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": vocabulary,
        "ggml.token_type": [3 if token in SPECIAL else 1 for token in vocabulary],
        "ggml.merges": list(MERGES),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "chat_template": TEMPLATE,
    }
