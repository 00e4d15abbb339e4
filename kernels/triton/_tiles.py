"""Tiles of N tokens of sealed pages: scores against a block of queries, and values under a block of weights.

A token n is addressed by `base[n]` (its page's layer segment) and `slot[n]` (its place in the page). Scales that are common
to a token are multiplied onto scores and weights, where they cost one operation a token instead of one an element; scales
per channel and per group are multiplied onto the codes.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton._codes import element, half_scale, signed, small_scale


@triton.jit
def key_codes4(base, head, slot, valid, SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
               BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """fp32 [DIM_PAD, N] of four-bit keys."""
    d = tl.arange(0, DIM_PAD)
    half: tl.constexpr = HEAD_DIM // 2
    row = tl.where(d < half, d, d - half)
    inside = (d < HEAD_DIM)[:, None] & valid[None, :]
    byte = tl.load(base[None, :] + ((head * half + row) * BLOCK_SIZE)[:, None] + slot[None, :], mask=inside, other=0)
    byte = byte.to(tl.int32)
    code = tl.where((d < half)[:, None], byte & 15, byte >> 4).to(tl.float32)
    own = (base + SCALES + head * 2 * HEAD_DIM)[None, :]
    return (code - signed(own, (HEAD_DIM + d)[:, None], inside)) * small_scale(own, d[:, None], inside)


@triton.jit
def value_codes4(base, head, slot, valid, SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, HALF_GROUPS: tl.constexpr, CODES: tl.constexpr):  # fmt: skip
    """fp32 [N, DIM_PAD] of four-bit values."""
    d = tl.arange(0, DIM_PAD)
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.where(d < half, d, d - half)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    byte = tl.load((base + CODES + (head * BLOCK_SIZE + slot) * half)[:, None] + column[None, :], mask=inside, other=0)
    byte = byte.to(tl.int32)
    code = tl.where((d < half)[None, :], byte & 15, byte >> 4).to(tl.float32)
    group = tl.where(d < half, 0, HALF_GROUPS) + column // 32
    own = (base + SCALES + head * (4 * HALF_GROUPS * BLOCK_SIZE) + slot)[:, None]
    zero = signed(own, ((2 * HALF_GROUPS + group) * BLOCK_SIZE)[None, :], inside)
    return (code - zero) * small_scale(own, (group * BLOCK_SIZE)[None, :], inside)


@triton.jit
def scores(q, base, head, slot, valid, tensor_scale, CODE: tl.constexpr, GRAIN: tl.constexpr, RAW: tl.constexpr,
           SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           DOT: tl.constexpr):  # fmt: skip
    """fp32 [M, N]: q [M, DIM_PAD] times the keys."""
    operand = q.to(DOT)
    if CODE == 4:
        keys = key_codes4(base, head, slot, valid, SCALES, HEAD_DIM, DIM_PAD, BLOCK_SIZE)
        result = tl.dot(operand, keys.to(DOT), input_precision="ieee")
    else:
        d = tl.arange(0, DIM_PAD)
        inside = (d < HEAD_DIM)[:, None] & valid[None, :]
        offset = ((head * HEAD_DIM + d) * BLOCK_SIZE)[:, None] + slot[None, :]
        keys = element(base[None, :], offset, inside, CODE, RAW)
        if GRAIN == 1:
            own = (base + SCALES)[None, :]
            channel = (head * 2 * HEAD_DIM + d)[:, None]
            keys = keys * half_scale(own, channel, inside)
            # the centre in a product of its own: added to the keys it would cost their precision
            centre = half_scale(own, channel + HEAD_DIM, inside)
            result = tl.dot(operand, centre.to(DOT), input_precision="ieee")
            result = tl.dot(operand, keys.to(DOT), acc=result, input_precision="ieee")
        else:
            result = tl.dot(operand, keys.to(DOT), input_precision="ieee")
            if GRAIN == 0:
                result *= half_scale(base + SCALES, head * BLOCK_SIZE + slot, valid)[None, :]
            if GRAIN == 2:
                result *= tensor_scale
    return result


@triton.jit
def weighted(p, acc, base, head, slot, valid, tensor_scale, CODE: tl.constexpr, GRAIN: tl.constexpr, RAW: tl.constexpr,
             CODES: tl.constexpr, SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
             BLOCK_SIZE: tl.constexpr, HALF_GROUPS: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """acc [M, DIM_PAD] plus the weights p fp32 [M, N] times the values."""
    if CODE == 4:
        values = value_codes4(base, head, slot, valid, SCALES, HEAD_DIM, DIM_PAD, BLOCK_SIZE, HALF_GROUPS, CODES)
    else:
        d = tl.arange(0, DIM_PAD)
        inside = valid[:, None] & (d < HEAD_DIM)[None, :]
        offset = ((head * BLOCK_SIZE + slot) * HEAD_DIM)[:, None] + d[None, :]
        values = element((base + CODES)[:, None], offset, inside, CODE, RAW)
        if GRAIN == 0:
            p = p * half_scale(base + SCALES, head * BLOCK_SIZE + slot, valid)[None, :]
        if GRAIN == 2:
            p = p * tensor_scale
    return tl.dot(p.to(DOT), values.to(DOT), acc=acc, input_precision="ieee")
