"""Keys of a tile of P sealed pages, and their scores against a block of queries.

Channels are handled in two halves (`low`: d < head_dim / 2, `high`: the rest), as four-bit codes are stored, which also
halves what is alive at a time. A tile is [HALF_PAD, P, BLOCK_SIZE], so that a scale per channel and page is loaded once
and not once per token. Scales per token are multiplied onto the scores, where they cost one operation a token.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton._codes import decode, half_scale, nibble, nibble_zero, raw_pointer, signed, small_scale


@triton.jit
def load_keys(base, head, valid, CODE: tl.constexpr, RAW: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
              BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Stored elements of both halves; `base` [P] are the layer's segments. Four-bit codes come twice in one tile."""
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF_PAD)[:, None, None]
    t = tl.arange(0, BLOCK_SIZE)[None, None, :]
    inside = (d < half) & valid[None, :, None]
    typed = raw_pointer(base, CODE, RAW)[None, :, None]
    if CODE == 4:
        low = tl.load(typed + (head * half + d) * BLOCK_SIZE + t, mask=inside, other=0)
        high = low
    else:
        low = tl.load(typed + (head * HEAD_DIM + d) * BLOCK_SIZE + t, mask=inside, other=0)
        high = tl.load(typed + (head * HEAD_DIM + half + d) * BLOCK_SIZE + t, mask=inside, other=0)
    return low, high


@triton.jit
def key_half(raw, base, head, valid, PART: tl.constexpr, CODE: tl.constexpr, GRAIN: tl.constexpr,
             SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, AS: tl.constexpr):  # fmt: skip
    """[HALF_PAD, P, BLOCK_SIZE] values of type AS under their per-channel scales; others, and centres, are left out."""
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF_PAD)
    inside = (d < half)[:, None] & valid[None, :]
    channel = head * 2 * HEAD_DIM + PART * half + d[:, None]
    if CODE == 4:
        own = (base + SCALES)[None, :]
        zero = nibble_zero(signed(own, channel + HEAD_DIM, inside), AS)
        scale = small_scale(own, channel, inside).to(AS)
        keys = (nibble(raw, PART, AS) - zero[:, :, None]) * scale[:, :, None]
    else:
        keys = decode(raw, CODE, AS)
        if GRAIN == 1:
            scale = half_scale((base + SCALES)[None, :], channel, inside)
            keys = keys * scale.to(AS)[:, :, None]
    return keys


@triton.jit
def centres(q_low, q_high, pages, table, page, high, head, layer_offset, PAGE_BYTES: tl.constexpr,
            SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, TILE_PAGES: tl.constexpr,
            BLOCK_M: tl.constexpr):  # fmt: skip
    """fp32 [M, TILE_PAGES]: q (fp32 halves) times the centre of each page's keys, one sum a page instead of a product.

    Added to the keys the centre would cost their precision.
    """
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF_PAD)
    column = tl.arange(0, TILE_PAGES)
    result = tl.zeros([BLOCK_M, TILE_PAGES], tl.float32)
    for i in tl.static_range(TILE_PAGES):
        there = page + i < high
        index = tl.load(table + page + i, mask=there, other=0).to(tl.int64)
        own = (pages + index * PAGE_BYTES + layer_offset + SCALES).to(tl.pointer_type(tl.float16))
        own += head * 2 * HEAD_DIM + HEAD_DIM
        inside = d < tl.where(there, half, 0)
        low = tl.load(own + d, mask=inside, other=0.0).to(tl.float32)
        top = tl.load(own + half + d, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(q_low * low[None, :] + q_high * top[None, :], axis=1)
        result = tl.where(column[None, :] == i, total[:, None], result)
    return result


@triton.jit
def product(a, b, acc, FP32: tl.constexpr):
    """acc + a [M, K] times b [K, N]. "ieee" fp32 leaves tensor cores out, and a thread holds all of K: 64 at a time."""
    if a.dtype == tl.float32 and FP32 == "ieee" and a.shape[1] > 64:
        a_low, a_high = tl.split(tl.permute(tl.reshape(a, [a.shape[0], 2, a.shape[1] // 2]), [0, 2, 1]))
        b_low, b_high = tl.split(tl.permute(tl.reshape(b, [2, b.shape[0] // 2, b.shape[1]]), [1, 2, 0]))
        acc = tl.dot(a_low, b_low, acc=acc, input_precision=FP32)
        acc = tl.dot(a_high, b_high, acc=acc, input_precision=FP32)
    else:
        acc = tl.dot(a, b, acc=acc, input_precision=FP32)
    return acc


@triton.jit
def scores(q_low, q_high, low, high, base, head, valid, tensor_scale, CODE: tl.constexpr, GRAIN: tl.constexpr,
           SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           TILE_PAGES: tl.constexpr, DOT: tl.constexpr, FP32: tl.constexpr):  # fmt: skip
    """fp32 [M, P * BLOCK_SIZE]: queries (halves, type DOT) times the loaded keys, without their centres."""
    wide: tl.constexpr = TILE_PAGES * BLOCK_SIZE
    keys = key_half(low, base, head, valid, 0, CODE, GRAIN, SCALES, HEAD_DIM, HALF_PAD, DOT)
    result = tl.zeros([q_low.shape[0], wide], tl.float32)
    result = product(q_low, tl.reshape(keys, [HALF_PAD, wide]), result, FP32)
    keys = key_half(high, base, head, valid, 1, CODE, GRAIN, SCALES, HEAD_DIM, HALF_PAD, DOT)
    result = product(q_high, tl.reshape(keys, [HALF_PAD, wide]), result, FP32)
    if GRAIN == 0:
        slot = head * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        scale = half_scale((base + SCALES)[:, None], slot[None, :], valid[:, None]).to(tl.float32)
        result *= tl.reshape(scale, [wide])[None, :]
    if GRAIN == 2:
        result *= tensor_scale
    return result
