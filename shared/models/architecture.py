"""From a model's own metadata to `ModelConfig`, and from `ModelConfig` to the list of tensors it must have.

Everything the four architectures share is here; `architectures/<name>.py` states the differences.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Literal

from shared.errors import Misconfigured
from shared.models import architectures
from shared.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What differs from Llama. `sliding`: which layers a `sliding_window` setting is about.

    `gguf_interleaved_rope`: GGUF stores q and k rows for interleaved rotation; we rotate halves, so rows are reordered.
    `head_dim`: the default when the configuration does not say (0: hidden_size / heads).
    `stop_tokens`: control tokens that end a turn even when the file lists only one end token.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    sliding: Literal["none", "all", "upper"] = "none"
    gguf_interleaved_rope: bool = False
    head_dim: int = 0
    stop_tokens: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """One source tensor: its two names, its shape, and the heads whose rows GGUF may have interleaved (0: none)."""

    gguf: str
    hf: str
    shape: tuple[int, ...]
    heads: int = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """One tensor of weights.safetensors: its parts, joined by rows."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def supported() -> list[str]:
    """Names of all architectures, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(architectures.__path__))


def load(name: str) -> Architecture:
    """The architecture called `name`. Misconfigured for an unknown one."""
    if name not in supported():
        raise Misconfigured(f"architecture {name!r} is not supported; supported are {', '.join(supported())}")
    spec: Architecture = importlib.import_module(f"{architectures.__name__}.{name}").SPEC
    return spec


def targets(config: ModelConfig) -> list[Target]:
    """Every tensor the model has, in the order in which they are stored."""
    hidden = config.hidden_size
    found = [_single("embed", "token_embd.weight", "model.embed_tokens.weight", (config.vocab_size, hidden))]
    for layer in range(config.layers):
        found += _layer(config, layer)
    found.append(_single("norm", "output_norm.weight", "model.norm.weight", (hidden,)))
    if not config.tie_embeddings:
        found.append(_single("head", "output.weight", "lm_head.weight", (config.vocab_size, hidden)))
    return found


def _single(name: str, gguf: str, hf: str, shape: tuple[int, ...]) -> Target:
    return Target(name, (Part(gguf, hf, shape),))


def _layer(config: ModelConfig, layer: int) -> list[Target]:
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    own, gguf, hf = f"layers.{layer}", f"blk.{layer}", f"model.layers.{layer}"

    def single(name: str, gguf_name: str, hf_name: str, *shape: int) -> Target:
        return _single(f"{own}.{name}", f"{gguf}.{gguf_name}.weight", f"{hf}.{hf_name}.weight", shape)

    def qkv(kind: str, *columns: int) -> tuple[Part, ...]:
        sides = (("q", config.q_rows, config.heads), ("k", config.kv_rows, config.kv_heads), ("v", config.kv_rows, 0))
        return tuple(
            Part(f"{gguf}.attn_{side}.{kind}", f"{hf}.self_attn.{side}_proj.{kind}", (rows, *columns), heads)
            for side, rows, heads in sides
        )

    found = [
        single("input_norm", "attn_norm", "input_layernorm", hidden),
        Target(f"{own}.qkv", qkv("weight", hidden)),
    ]
    if config.qkv_bias:
        found.append(Target(f"{own}.qkv_bias", qkv("bias")))
    if config.qk_norm:
        found.append(single("q_norm", "attn_q_norm", "self_attn.q_norm", dim))
        found.append(single("k_norm", "attn_k_norm", "self_attn.k_norm", dim))
    gate_up = tuple(
        Part(f"{gguf}.ffn_{side}.weight", f"{hf}.mlp.{side}_proj.weight", (ffn, hidden)) for side in ("gate", "up")
    )
    return [
        *found,
        single("o", "attn_output", "self_attn.o_proj", hidden, config.q_rows),
        single("post_norm", "ffn_norm", "post_attention_layernorm", hidden),
        Target(f"{own}.gate_up", gate_up),
        single("down", "ffn_down", "mlp.down_proj", hidden, ffn),
    ]
