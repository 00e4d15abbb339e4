"""`ModelConfig` from Hugging Face's config.json, in its old (`rope_scaling`) and new (`rope_parameters`) forms."""

from __future__ import annotations

from shared.errors import Misconfigured
from shared.models.architecture import Architecture, load
from shared.models.config import ModelConfig, Rope
from shared.models.fields import Fields


def model_config(fields: Fields, name: str) -> ModelConfig:
    """`name` is how the model is shown. Misconfigured names what is missing, ill-typed or unsupported."""
    if "model_type" not in fields:
        raise Misconfigured(f"{fields.origin}: field 'model_type' is missing; is this a Hugging Face model folder?")
    architecture = fields.text("model_type")
    spec = load(architecture)
    _refuse_variants(fields)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    layers, context = fields.integer("num_hidden_layers"), fields.integer("max_position_embeddings")
    head_dim = fields.integer("head_dim", spec.head_dim or hidden // heads)
    rope = _rope(fields, head_dim, context)
    if rope.kind == "yarn":
        context = max(context, int(rope.factor * rope.original_context_length))
    window, sliding = _sliding(fields, spec, layers)
    config = ModelConfig(
        architecture=architecture,
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        hidden_size=hidden,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        context_length=context,
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm,
        sliding_window=window,
        sliding_layers=sliding,
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise Misconfigured(
            f"{fields.origin}: {heads} heads, {config.kv_heads} key-value heads of {config.head_dim}: no fit"
        )
    return config


def _refuse_variants(fields: Fields) -> None:
    if "quantization_config" in fields:
        method = fields.table("quantization_config").text("quant_method", "unknown")
        raise Misconfigured(f"{fields.origin}: quantisation {method!r} is not supported; use the original or a GGUF")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise Misconfigured(f"{fields.origin}: activation {activation!r} is not supported, only 'silu'")


def _sliding(fields: Fields, spec: Architecture, layers: int) -> tuple[int, tuple[int, ...]]:
    if spec.sliding == "none" or "sliding_window" not in fields or not fields.values.get("use_sliding_window", True):
        return 0, ()
    if spec.sliding == "upper" and "use_sliding_window" not in fields:
        return 0, ()
    window = fields.integer("sliding_window")
    kinds = fields.values.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return window, tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    first = 0 if spec.sliding == "all" else fields.integer("max_window_layers", 28, minimum=0)
    return window, tuple(range(first, layers))


def _rope(fields: Fields, head_dim: int, context: int) -> Rope:
    scaling = fields.table("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    base = scaling.number("rope_theta", fields.number("rope_theta", 10_000.0))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise Misconfigured(f"{fields.origin}: rotary positions over a part of the head ({partial}) are not supported")
    original = fields.integer("original_max_position_embeddings", context)
    original = scaling.integer("original_max_position_embeddings", original)
    match kind:
        case "default":
            return Rope(base)
        case "linear":
            return Rope(base, "linear", scaling.number("factor"))
        case "dynamic":
            return Rope(base, "dynamic", scaling.number("factor"), context)
        case "llama3":
            low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
            return Rope(base, "llama3", scaling.number("factor"), original, low_freq_factor=low, high_freq_factor=high)
        case "yarn":
            return Rope(
                base,
                "yarn",
                scaling.number("factor", context / original),
                original,
                attention_factor=scaling.optional_number("attention_factor"),
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                mscale=scaling.optional_number("mscale"),
                mscale_all_dim=scaling.optional_number("mscale_all_dim"),
                truncate=scaling.flag("truncate", True),
            )
        case "longrope" | "su":
            return Rope(
                base,
                "longrope",
                scaling.number("factor", context / original),
                original,
                attention_factor=scaling.optional_number("attention_factor"),
                short_factors=scaling.numbers("short_factor", head_dim // 2),
                long_factors=scaling.numbers("long_factor", head_dim // 2),
            )
    raise Misconfigured(
        f"{scaling.origin}: rope type {kind!r} is not supported; supported are "
        "default, linear, dynamic, llama3, yarn, longrope"
    )
