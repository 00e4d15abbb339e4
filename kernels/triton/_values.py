"""Values of a tile of N sealed tokens, and their sum under a block of weights. Halves of channels as in `_keys.py`.

A token n is addressed by `base[n]` (its page's layer segment) and `slot[n]` (its place in the page). Scales per token
are multiplied onto the weights, scales per group of channels onto the values.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton._codes import decode, half_scale, nibble, nibble_zero, raw_pointer, signed, small_scale


@triton.jit
def load_values(base, head, slot, valid, CODE: tl.constexpr, RAW: tl.constexpr, CODES: tl.constexpr,
                HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                GROUPS: tl.constexpr):  # fmt: skip
    """Stored elements of both halves, [N, HALF_PAD]; four-bit codes come twice in one tile [N, HALF_PAD / 32, 32].

    GROUPS: scale groups of half the channels of a token (int4).
    """
    half: tl.constexpr = HEAD_DIM // 2
    if CODE == 4:
        d = (tl.arange(0, HALF_PAD // 32) * 32)[:, None] + tl.arange(0, 32)[None, :]
        inside = valid[:, None, None] & (d < half)[None, :, :]
        own = base + CODES + (head * BLOCK_SIZE + slot) * half
        low = tl.load(own[:, None, None] + d[None, :, :], mask=inside, other=0)
        high = low
    else:
        d = tl.arange(0, HALF_PAD)
        inside = valid[:, None] & (d < half)[None, :]
        own = raw_pointer(base + CODES, CODE, RAW) + (head * BLOCK_SIZE + slot) * HEAD_DIM
        low = tl.load(own[:, None] + d[None, :], mask=inside, other=0)
        high = tl.load(own[:, None] + (half + d)[None, :], mask=inside, other=0)
    return low, high


@triton.jit
def value_half(raw, base, head, slot, valid, PART: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr,
               HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
               AS: tl.constexpr):  # fmt: skip
    """[N, HALF_PAD] values of type AS under their scales per group; scales per token are left out."""
    if CODE == 4:
        g = tl.arange(0, HALF_PAD // 32)[None, :]
        inside = valid[:, None] & (g < GROUPS)
        own = (base + SCALES + head * (4 * GROUPS * BLOCK_SIZE) + slot)[:, None]
        group = (PART * GROUPS + g) * BLOCK_SIZE
        zero = nibble_zero(signed(own, group + 2 * GROUPS * BLOCK_SIZE, inside), AS)
        scale = small_scale(own, group, inside).to(AS)
        values = (nibble(raw, PART, AS) - zero[:, :, None]) * scale[:, :, None]
        values = tl.reshape(values, [BLOCK_N, HALF_PAD])
    else:
        values = decode(raw, CODE, AS)
    return values


@triton.jit
def weighted(p, shrink, acc_low, acc_high, low, high, base, head, slot, valid, tensor_scale, CODE: tl.constexpr,
             GRAIN: tl.constexpr, SCALES: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
             GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, FP32: tl.constexpr):  # fmt: skip
    """Both halves of acc [M, HALF_PAD], times `shrink` [M], plus the weights p fp32 [M, N] times the loaded values.

    FP32: what `tl.dot` shall do with fp32.
    """
    unit = 1.0
    if GRAIN == 0 and CODE != 4:
        # relative to the tile's largest scale, so that the weights stay within the range of fp16
        scale = half_scale(base + SCALES, head * BLOCK_SIZE + slot, valid).to(tl.float32)
        unit = tl.maximum(tl.max(scale, axis=0), 5.9604644775390625e-08)
        p = p * (scale / unit)[None, :]
    if GRAIN == 2:
        unit = tensor_scale
    weights = p.to(DOT)
    acc_low, acc_high = acc_low * shrink[:, None], acc_high * shrink[:, None]
    values = value_half(low, base, head, slot, valid, 0, CODE, SCALES, HALF_PAD, BLOCK_SIZE, GROUPS, BLOCK_N, DOT)
    if CODE == 0 or CODE == 4:
        acc_low = tl.dot(weights, values, acc=acc_low, input_precision=FP32)
    else:
        acc_low += unit * tl.dot(weights, values, input_precision=FP32)
    values = value_half(high, base, head, slot, valid, 1, CODE, SCALES, HALF_PAD, BLOCK_SIZE, GROUPS, BLOCK_N, DOT)
    if CODE == 0 or CODE == 4:
        acc_high = tl.dot(weights, values, acc=acc_high, input_precision=FP32)
    else:
        acc_high += unit * tl.dot(weights, values, input_precision=FP32)
    return acc_low, acc_high
