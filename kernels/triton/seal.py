"""Sealing in Triton: full-precision activations to the bytes of a page, the same bytes as `kernels/formats` writes."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import PageLayout
from kernels.reference._pages import tail_views
from kernels.triton._codes import encode8, four_bit_code, four_bit_range, half_up
from kernels.triton._formats import constants


@triton.jit
def _seal_keys(k, base, head, tensor_scale, CODE: tl.constexpr, GRAIN: tl.constexpr, RAW: tl.constexpr,
               SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
               k_token):  # fmt: skip
    """K of one head of one page: `k` points at its first token, `k_token` elements from token to token."""
    t = tl.arange(0, BLOCK_SIZE)
    if CODE == 4:
        half: tl.constexpr = HEAD_DIM // 2
        j = tl.arange(0, DIM_PAD // 2)
        inside = (t >= 0)[:, None] & (j < half)[None, :]
        source = k + (t * k_token)[:, None] + j[None, :]
        scales = base + SCALES + head * 2 * HEAD_DIM
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        low_byte, low_scale, low_zero = four_bit_range(tl.min(low, axis=0), tl.max(low, axis=0))
        high_byte, high_scale, high_zero = four_bit_range(tl.min(high, axis=0), tl.max(high, axis=0))
        code = four_bit_code(low, low_scale[None, :], low_zero[None, :])
        code |= four_bit_code(high, high_scale[None, :], high_zero[None, :]) << 4
        target = base + ((head * half + j) * BLOCK_SIZE)[None, :] + t[:, None]
        tl.store(target, code.to(tl.uint8), mask=inside)
        tl.store(scales + j, low_byte.to(tl.uint8), mask=j < half)
        tl.store(scales + half + j, high_byte.to(tl.uint8), mask=j < half)
        zeros = (scales + HEAD_DIM).to(tl.pointer_type(tl.int8))
        tl.store(zeros + j, low_zero.to(tl.int32).to(tl.int8), mask=j < half)
        tl.store(zeros + half + j, high_zero.to(tl.int32).to(tl.int8), mask=j < half)
    else:
        d = tl.arange(0, DIM_PAD)
        inside = (t >= 0)[:, None] & (d < HEAD_DIM)[None, :]
        x = tl.load(k + (t * k_token)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        offset = ((head * HEAD_DIM + d) * BLOCK_SIZE)[None, :] + t[:, None]
        if CODE == 0:
            tl.store(base.to(tl.pointer_type(RAW)) + offset, _finite(x, RAW), mask=inside)
        else:
            top: tl.constexpr = 127.0 if CODE == 1 else (448.0 if CODE == 2 else 57344.0)
            scales = (base + SCALES).to(tl.pointer_type(tl.int16))
            if GRAIN == 0:
                bits, s = half_up(tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full([BLOCK_SIZE], top, tl.float32)))
                tl.store(scales + head * BLOCK_SIZE + t, bits)
                ratio = tl.div_rn(x, tl.broadcast_to(s[:, None], x.shape))
            elif GRAIN == 1:
                low, high = tl.min(x, axis=0), tl.max(x, axis=0)
                middle = tl.minimum(tl.maximum((high + low) * 0.5, -65504.0), 65504.0).to(tl.float16)
                c = middle.to(tl.float32)
                wide = tl.maximum(high - c, c - low)
                bits, s = half_up(tl.div_rn(wide, tl.full([DIM_PAD], 127.0, tl.float32)))
                own = scales + head * 2 * HEAD_DIM + d
                tl.store(own, bits, mask=d < HEAD_DIM)
                tl.store(own + HEAD_DIM, middle.to(tl.int16, bitcast=True), mask=d < HEAD_DIM)
                ratio = tl.div_rn(x - c[None, :], tl.broadcast_to(s[None, :], x.shape))
            else:
                ratio = tl.div_rn(x, tl.broadcast_to(tensor_scale, x.shape))
            tl.store(base + offset, encode8(ratio, CODE), mask=inside)


@triton.jit
def _seal_values(v, base, head, tensor_scale, CODE: tl.constexpr, GRAIN: tl.constexpr, RAW: tl.constexpr,
                 SCALES: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 GROUPS: tl.constexpr, v_token):  # fmt: skip
    """V of one head of one page; `base` points at the V codes, SCALES is relative to them."""
    t = tl.arange(0, BLOCK_SIZE)
    if CODE == 4:
        half: tl.constexpr = HEAD_DIM // 2
        scales = base + SCALES + head * (4 * GROUPS * BLOCK_SIZE) + t
        zeros = (scales + 2 * GROUPS * BLOCK_SIZE).to(tl.pointer_type(tl.int8))
        for group in tl.static_range(GROUPS):
            j = group * 32 + tl.arange(0, 32)
            inside = (t >= 0)[:, None] & (j < half)[None, :]
            source = v + (t * v_token)[:, None] + j[None, :]
            low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
            low_byte, low_scale, low_zero = _token_range(low, inside)
            high_byte, high_scale, high_zero = _token_range(high, inside)
            code = four_bit_code(low, low_scale[:, None], low_zero[:, None])
            code |= four_bit_code(high, high_scale[:, None], high_zero[:, None]) << 4
            tl.store(base + ((head * BLOCK_SIZE + t) * half)[:, None] + j[None, :], code.to(tl.uint8), mask=inside)
            tl.store(scales + group * BLOCK_SIZE, low_byte.to(tl.uint8))
            tl.store(scales + (GROUPS + group) * BLOCK_SIZE, high_byte.to(tl.uint8))
            tl.store(zeros + group * BLOCK_SIZE, low_zero.to(tl.int32).to(tl.int8))
            tl.store(zeros + (GROUPS + group) * BLOCK_SIZE, high_zero.to(tl.int32).to(tl.int8))
    else:
        d = tl.arange(0, DIM_PAD)
        inside = (t >= 0)[:, None] & (d < HEAD_DIM)[None, :]
        x = tl.load(v + (t * v_token)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        offset = ((head * BLOCK_SIZE + t) * HEAD_DIM)[:, None] + d[None, :]
        if CODE == 0:
            tl.store(base.to(tl.pointer_type(RAW)) + offset, _finite(x, RAW), mask=inside)
        else:
            top: tl.constexpr = 127.0 if CODE == 1 else (448.0 if CODE == 2 else 57344.0)
            if GRAIN == 0:
                bits, s = half_up(tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full([BLOCK_SIZE], top, tl.float32)))
                tl.store((base + SCALES).to(tl.pointer_type(tl.int16)) + head * BLOCK_SIZE + t, bits)
                ratio = tl.div_rn(x, tl.broadcast_to(s[:, None], x.shape))
            else:
                ratio = tl.div_rn(x, tl.broadcast_to(tensor_scale, x.shape))
            tl.store(base + offset, encode8(ratio, CODE), mask=inside)


@triton.jit
def _token_range(x, inside):
    """Range of each token over the channels inside its group."""
    low = tl.min(tl.where(inside, x, float("inf")), axis=1)
    return four_bit_range(low, tl.max(tl.where(inside, x, float("-inf")), axis=1))


@triton.jit
def _finite(x, RAW: tl.constexpr):
    """x in RAW, to nearest even, saturated at its largest finite value; NaN stays NaN.

    bf16 is rounded by integers, since the interpreter's cast cuts off.
    """
    if RAW == tl.float16:  # noqa: SIM300
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        value = x.to(RAW)
    elif RAW == tl.bfloat16:  # noqa: SIM300
        top: tl.constexpr = 3.3895313892515355e38
        x = tl.where(x > top, top, tl.where(x < -top, -top, x))
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(x != x, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = x.to(RAW)
    return value


@triton.jit(do_not_specialize=("layer",))
def seal_kernel(
    k, v, pages, block_ids, scales, k_page, k_token, k_head, v_page, v_token, v_head, layer, layer_offset,
    PAGE_BYTES: tl.constexpr, K_SCALES: tl.constexpr, V_CODES: tl.constexpr, V_SCALES: tl.constexpr,
    K_CODE: tl.constexpr, K_GRAIN: tl.constexpr, K_RAW: tl.constexpr,
    V_CODE: tl.constexpr, V_GRAIN: tl.constexpr, V_RAW: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (pages, KV_HEADS)."""
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = pages + tl.load(block_ids + page).to(tl.int64) * PAGE_BYTES + layer_offset
    k_scale, v_scale = 1.0, 1.0
    if K_GRAIN == 2:
        k_scale = tl.load(scales + layer * 2)
    if V_GRAIN == 2:
        v_scale = tl.load(scales + layer * 2 + 1)
    _seal_keys(k + page * k_page + head * k_head, base, head, k_scale, K_CODE, K_GRAIN, K_RAW, K_SCALES, HEAD_DIM,
               2 * HALF_PAD, BLOCK_SIZE, k_token)  # fmt: skip
    _seal_values(v + page * v_page + head * v_head, base + V_CODES, head, v_scale, V_CODE, V_GRAIN, V_RAW,
                 V_SCALES - V_CODES, HEAD_DIM, 2 * HALF_PAD, BLOCK_SIZE, GROUPS, v_token)  # fmt: skip


def seal(
    pages: Tensor,
    layout: PageLayout,
    layer: int,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    scales: Tensor | None = None,
) -> None:
    """The contract of `kernels.reference.seal`; the last dimension of k and v must be contiguous."""
    size = layout.block_size
    steps = (size * k.stride(0), k.stride(0), k.stride(1), size * v.stride(0), v.stride(0), v.stride(1))
    _launch(pages, layout, layer, k, v, block_ids, steps, scales)


def seal_tails(
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    slots: Tensor,
    block_ids: Tensor,
    scales: Tensor | None = None,
) -> None:
    """The contract of `kernels.reference.seal_tails`; indices may be on the host."""
    slots, block_ids = slots.to(pages.device), block_ids.to(pages.device)
    for layer in range(layout.layers):
        k, v = (side_[slots.long()] for side_ in tail_views(tails, layout, layer))
        steps = (k.stride(0), k.stride(2), k.stride(1), v.stride(0), v.stride(2), v.stride(1))
        _launch(pages, layout, layer, k, v, block_ids, steps, scales)


def _launch(
    pages: Tensor, layout: PageLayout, layer: int, k: Tensor, v: Tensor, block_ids: Tensor, steps: tuple[int, ...],
    scales: Tensor | None,
) -> None:  # fmt: skip
    place = layout.layer(layer)
    place.check_scales(scales is not None)
    if not block_ids.numel():
        return
    block_ids = block_ids.to(pages.device)
    scales = None if scales is None else scales.to(pages.device)
    seal_kernel[(block_ids.numel(), layout.kv_heads)](
        k, v, pages, block_ids, k if scales is None else scales, *steps, layer, place.offset,
        **constants(layout, place), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
