"""Pages back to activations, and copies of whole pages."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import PageLayout
from kernels.reference.gather import copy_pages
from kernels.triton._codes import element, half_scale
from kernels.triton._formats import TORCH_TYPES, constants, side
from kernels.triton._tiles import key_codes4, value_codes4

__all__ = ["copy_pages", "gather"]


@triton.jit
def gather_kernel(
    k, v, pages, block_ids, scales, layer, layer_offset,
    PAGE_BYTES: tl.constexpr, K_SCALES: tl.constexpr, V_CODES: tl.constexpr, V_SCALES: tl.constexpr,
    K_CODE: tl.constexpr, K_GRAIN: tl.constexpr, K_RAW: tl.constexpr,
    V_CODE: tl.constexpr, V_GRAIN: tl.constexpr, V_RAW: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF_GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (pages, KV_HEADS); k, v [pages * BLOCK_SIZE, KV_HEADS, HEAD_DIM]."""
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, BLOCK_SIZE)
    d = tl.arange(0, DIM_PAD)
    valid = t >= 0
    start = pages + tl.load(block_ids + page).to(tl.int64) * PAGE_BYTES + layer_offset
    base = start + tl.zeros([BLOCK_SIZE], tl.int64)
    inside = (d < HEAD_DIM)[:, None] & valid[None, :]
    if K_CODE == 4:
        keys = key_codes4(base, head, t, valid, K_SCALES, HEAD_DIM, DIM_PAD, BLOCK_SIZE)
    else:
        keys = element(base[None, :], ((head * HEAD_DIM + d) * BLOCK_SIZE)[:, None] + t[None, :], inside, K_CODE, K_RAW)
        keys = keys.to(tl.float32)
        if K_GRAIN == 0:
            keys *= half_scale(base + K_SCALES, head * BLOCK_SIZE + t, valid)[None, :]
        if K_GRAIN == 1:
            channel = (head * 2 * HEAD_DIM + d)[:, None]
            own = (base + K_SCALES)[None, :]
            keys = keys * half_scale(own, channel, inside) + half_scale(own, channel + HEAD_DIM, inside)
        if K_GRAIN == 2:
            keys *= tl.load(scales + layer * 2)
    row = ((page * BLOCK_SIZE + t) * KV_HEADS + head) * HEAD_DIM
    tl.store(k + row[None, :] + d[:, None], keys.to(k.dtype.element_ty), mask=inside)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    if V_CODE == 4:
        values = value_codes4(base, head, t, valid, V_SCALES, HEAD_DIM, DIM_PAD, BLOCK_SIZE, HALF_GROUPS, V_CODES)
    else:
        offset = ((head * BLOCK_SIZE + t) * HEAD_DIM)[:, None] + d[None, :]
        values = element((base + V_CODES)[:, None], offset, inside, V_CODE, V_RAW).to(tl.float32)
        if V_GRAIN == 0:
            values *= half_scale(base + V_SCALES, head * BLOCK_SIZE + t, valid)[:, None]
        if V_GRAIN == 2:
            values *= tl.load(scales + layer * 2 + 1)
    tl.store(v + row[:, None] + d[None, :], values.to(v.dtype.element_ty), mask=inside)


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
    grains = (side(place.k_format, keys=True).granularity, side(place.v_format, keys=False).granularity)
    if scales is None and 2 in grains:
        raise ValueError(f"{place.k_format}/{place.v_format} needs scales that outlive a page; give kv_scales_path")
    shape = (block_ids.numel() * layout.block_size, layout.kv_heads, layout.head_dim)
    k = torch.empty(shape, dtype=dtype or TORCH_TYPES[layout.tail_format], device=pages.device)
    v = torch.empty_like(k)
    if block_ids.numel():
        gather_kernel[(block_ids.numel(), layout.kv_heads)](
            k, v, pages, block_ids, k if scales is None else scales, layer, place.offset,
            **constants(layout, place), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return k, v
