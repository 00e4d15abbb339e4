"""Rotary frequencies of every scaling variant found in Llama, Mistral, SmolLM2, Qwen2 and Qwen3 configurations.

Pages are immutable and shared, so a model has one set of frequencies: those for a sequence of `context_length` tokens.
Variants whose frequencies follow the current length elsewhere (dynamic, longrope) are therefore fixed at load.
All arithmetic is float32, in the order of the models' own code, so that angles agree to the last bit or nearly so.
"""

from __future__ import annotations

import math

import numpy as np

from shared.models.config import ModelConfig, Rope


def inverse_frequencies(config: ModelConfig, context_length: int | None = None) -> tuple[np.ndarray, float]:
    """float32 [head_dim / 2] radians per position, and the factor by which cos and sin are multiplied.

    `context_length` (default: the model's own) picks the frequencies of the length-dependent variants.
    """
    rope, dim = config.rope, config.head_dim
    length = config.context_length if context_length is None else context_length
    plain = _plain(rope.base, dim)
    match rope.kind:
        case "none":
            return plain, 1.0
        case "linear":
            return plain / np.float32(rope.factor), 1.0
        case "factors":
            return plain / np.asarray(rope.factors, np.float32), 1.0
        case "dynamic":
            return _dynamic(rope, dim, length), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, dim)
        case "longrope":
            return _longrope(rope, dim, length)


def _plain(base: float, dim: int) -> np.ndarray:
    return np.float32(1.0) / np.float32(base) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _dynamic(rope: Rope, dim: int, length: int) -> np.ndarray:
    """NTK-aware base for `length` tokens; unscaled up to the original context."""
    stretch = rope.factor * max(length, rope.original_context_length) / rope.original_context_length
    return _plain(rope.base * (stretch - (rope.factor - 1)) ** (dim / (dim - 2)), dim)


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Long waves are divided by `factor`, short ones kept, those between blended (Llama 3.1)."""
    old = rope.original_context_length
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (np.float32(old) / wavelength - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    scaled = plain / np.float32(rope.factor)
    blended = (1 - smooth) * scaled + smooth * plain
    long_wave = wavelength > old / rope.low_freq_factor
    short_wave = wavelength < old / rope.high_freq_factor
    return np.where(long_wave, scaled, np.where(short_wave, plain, blended)).astype(np.float32)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(rope: Rope, dim: int) -> tuple[np.ndarray, float]:
    """YaRN, https://arxiv.org/abs/2309.00071: per-channel ramp between interpolation and extrapolation."""

    def turning(rotations: float) -> float:
        return dim * math.log(rope.original_context_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    plain = _plain(rope.base, dim)
    frequencies = plain / np.float32(rope.factor) * (1 - keep) + plain * keep
    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return frequencies.astype(np.float32), _mscale(rope.factor) if factor is None else factor


def _longrope(rope: Rope, dim: int, length: int) -> tuple[np.ndarray, float]:
    """LongRoPE, https://arxiv.org/abs/2402.13753: searched divisors, another set beyond the original length."""
    old = rope.original_context_length
    divisors = rope.long_factors if length > old else rope.short_factors
    factor = rope.attention_factor
    if factor is None:
        factor = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(old))
    return _plain(rope.base, dim) / np.asarray(divisors, np.float32), factor
