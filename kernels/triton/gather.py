"""Pages back to activations, and copies of whole pages."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import PageLayout
from kernels.reference.gather import copy_pages
from kernels.triton._codes import half_scale
from kernels.triton._formats import TORCH_TYPES, constants
from kernels.triton._keys import key_half, load_keys
from kernels.triton._values import load_values, value_half

__all__ = ["copy_pages", "gather"]


@triton.jit(do_not_specialize=("layer",))
def gather_kernel(
    k, v, pages, block_ids, scales, layer, layer_offset,
    PAGE_BYTES: tl.constexpr, K_SCALES: tl.constexpr, V_CODES: tl.constexpr, V_SCALES: tl.constexpr,
    K_CODE: tl.constexpr, K_GRAIN: tl.constexpr, K_RAW: tl.constexpr,
    V_CODE: tl.constexpr, V_GRAIN: tl.constexpr, V_RAW: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (pages, KV_HEADS); k, v [pages * BLOCK_SIZE, KV_HEADS, HEAD_DIM]."""
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, BLOCK_SIZE)
    d = tl.arange(0, HALF_PAD)
    half: tl.constexpr = HEAD_DIM // 2
    start = pages + tl.load(block_ids + page).to(tl.int64) * PAGE_BYTES + layer_offset
    row = ((page * BLOCK_SIZE + t) * KV_HEADS + head) * HEAD_DIM
    one = tl.arange(0, 1)
    base, valid = start + one, one >= 0
    raw = load_keys(base, head, valid, K_CODE, K_RAW, HEAD_DIM, HALF_PAD, BLOCK_SIZE)
    for part in tl.static_range(2):
        keys = key_half(raw[part], base, head, valid, part, K_CODE, K_GRAIN, K_SCALES, HEAD_DIM, HALF_PAD, tl.float32)
        keys = tl.reshape(keys, [HALF_PAD, BLOCK_SIZE])
        if K_GRAIN == 0:
            keys *= half_scale(start + K_SCALES, head * BLOCK_SIZE + t, t >= 0).to(tl.float32)[None, :]
        if K_GRAIN == 1 and K_CODE != 4:
            channel = (2 * head + 1) * HEAD_DIM + part * half + d
            keys += half_scale(start + K_SCALES, channel, d < half).to(tl.float32)[:, None]
        if K_GRAIN == 2:
            keys *= tl.load(scales + layer * 2)
        target = k + row[None, :] + (part * half + d)[:, None]
        tl.store(target, keys.to(k.dtype.element_ty), mask=(d < half)[:, None] & (t >= 0)[None, :])
    base, valid = start + t * 0, t >= 0
    raw = load_values(base, head, t, valid, V_CODE, V_RAW, V_CODES, HEAD_DIM, HALF_PAD, BLOCK_SIZE, GROUPS)
    for part in tl.static_range(2):
        values = value_half(raw[part], base, head, t, valid, part, V_CODE, V_SCALES, HALF_PAD, BLOCK_SIZE, GROUPS,
                            BLOCK_SIZE, tl.float32)  # fmt: skip
        if V_GRAIN == 0 and V_CODE != 4:
            values *= half_scale(start + V_SCALES, head * BLOCK_SIZE + t, valid).to(tl.float32)[:, None]
        if V_GRAIN == 2:
            values *= tl.load(scales + layer * 2 + 1)
        target = v + row[:, None] + (part * half + d)[None, :]
        tl.store(target, values.to(v.dtype.element_ty), mask=valid[:, None] & (d < half)[None, :])


def gather(
    pages: Tensor,
    layout: PageLayout,
    layer: int,
    block_ids: Tensor,
    *,
    dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The contract of `kernels.reference.gather`, for fp32, fp16 and bf16 results."""
    place = layout.layer(layer)
    place.check_scales(scales is not None)
    shape = (block_ids.numel() * layout.block_size, layout.kv_heads, layout.head_dim)
    k = torch.empty(shape, dtype=dtype or TORCH_TYPES[layout.tail_format], device=pages.device)
    v = torch.empty_like(k)
    if block_ids.numel():
        gather_kernel[(block_ids.numel(), layout.kv_heads)](
            k, v, pages, block_ids, k if scales is None else scales, layer, place.offset,
            **constants(layout, place), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return k, v
