"""Gather pages back to activations and copy whole pages; contract in `kernels/reference/gather.py`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu import build, geometry
from kernels.layout import PageLayout
from kernels.reference._pages import tail_dtype


class GatherCall(ctypes.Structure):
    """`kv_gather_call` of gather.c"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "ids", "k", "v", "scales")),
        *((name, ctypes.c_int64) for name in ("count", "token_stride", "head_stride")),
        ("kind", ctypes.c_int32),
    ]


def gather(
    pages: Tensor,
    layout: PageLayout,
    layer: int,
    block_ids: Tensor,
    *,
    dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decoded K and V of pages `block_ids` [n], each [n * block_size, kv_heads, head_dim]; compute dtype by default."""
    ids = geometry.ids(block_ids)
    shape = (ids.numel() * layout.block_size, layout.kv_heads, layout.head_dim)
    k = torch.empty(shape, dtype=dtype or tail_dtype(layout))
    v = torch.empty_like(k)
    gather_into(pages, layout, layer, ids, k, v, scales)
    return k, v


def gather_into(
    pages: Tensor, layout: PageLayout, layer: int, ids: Tensor, k: Tensor, v: Tensor, scales: Tensor | None
) -> None:
    """`gather` into k and v of equal strides: [tokens, kv_heads, head_dim] with contiguous channels; ids int32."""
    if k.stride() != v.stride() or k.stride(2) != 1 or k.dtype != v.dtype or k.dtype not in geometry.DTYPES:
        raise ValueError("k and v must be alike, fp32, bf16 or fp16, with contiguous channels")
    call = GatherCall(
        pages.data_ptr(),
        ids.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        geometry.layer_scales(layout, layer, scales),
        ids.numel(),
        k.stride(0),
        k.stride(1),
        geometry.DTYPES[k.dtype],
    )
    build.load().kv_gather(ctypes.byref(geometry.layers(layout)[layer]), ctypes.byref(call))


def copy_pages(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Row src_ids[i] of `src` to row dst_ids[i] of `dst`, uint8 [rows, bytes] of equal width; also for tails."""
    source, target = geometry.ids(src_ids), geometry.ids(dst_ids)
    if src.shape[1] != dst.shape[1] or source.numel() != target.numel():
        raise ValueError("rows of equal width, and as many sources as targets")
    build.load().kv_copy_rows(
        ctypes.c_void_p(src.data_ptr()),
        ctypes.c_void_p(dst.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_int64(source.numel()),
        ctypes.c_int64(src.shape[1]),
    )
