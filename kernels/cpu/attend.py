"""Attention over pages and tails; contract in `kernels/reference/attend.py`. Prompt chunks go on to `prefill.py`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.attention import Batch, check
from kernels.cpu import build, geometry
from kernels.layout import PageLayout


class Decode(ctypes.Structure):
    """`kv_decode` of attend_job.h"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "tails", "q", "out")),
        *((name, ctypes.c_void_p) for name in ("tables", "page_counts", "tail_slots", "tail_lengths", "query_starts")),
        *((name, ctypes.c_void_p) for name in ("head_tables", "head_counts", "scales", "page_lse")),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("q_kind", "sequences", "q_heads", "table_stride", "max_pages", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def attend(
    q: Tensor,
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    scales: Tensor | None = None,
    page_lse: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, q_heads, head_dim]; out has q's shape and dtype (fp32, bf16 or fp16).

    ValueError for what it cannot read or write as it lies in memory; MemoryError without room for partial results.
    """
    check(batch, q, layout.kv_heads, layout.head_dim, window, page_lse)
    if q.dtype not in geometry.DTYPES:
        raise ValueError(f"q must be fp32, bf16 or fp16, not {q.dtype}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError("out must be contiguous, with q's shape and dtype")
    if q.stride(2) != 1 or q.stride(1) != layout.head_dim:
        q = q.contiguous()
    if batch.tables.stride(1) != 1:
        raise ValueError("tables must have contiguous rows")
    if batch.max_query > 1:
        from kernels.cpu.prefill import prefill

        return prefill(q, pages, tails, layout, layer, batch, scale, window, softcap, scales, out)

    sparse, counts = batch.kv_head_tables, batch.kv_head_counts
    table = batch.tables if sparse is None else sparse
    if not all(x is None or x.is_contiguous() for x in (sparse, counts)):
        raise ValueError("kv_head_tables and kv_head_counts must be contiguous")
    if page_lse is not None and not (page_lse.is_contiguous() and page_lse.dtype == torch.float32):
        raise ValueError("page_lse must be contiguous fp32")
    call = Decode(
        pages.data_ptr(),
        tails.data_ptr(),
        q.data_ptr(),
        out.data_ptr(),
        batch.tables.data_ptr(),
        batch.page_counts.data_ptr(),
        batch.tail_slots.data_ptr(),
        batch.tail_lengths.data_ptr(),
        batch.query_starts.data_ptr(),
        None if sparse is None else sparse.data_ptr(),
        None if counts is None else counts.data_ptr(),
        geometry.layer_scales(layout, layer, scales),
        None if page_lse is None else page_lse.data_ptr(),
        q.stride(0),
        geometry.DTYPES[q.dtype],
        len(batch),
        q.shape[1],
        table.stride(-2),
        batch.max_pages,
        window,
        scale,
        softcap,
    )
    if build.load().kv_attend_decode(ctypes.byref(geometry.layers(layout)[layer]), ctypes.byref(call)):
        raise MemoryError("no memory for partial attention results")
    return out
