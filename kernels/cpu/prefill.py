"""Attention of prompt chunks; called by `attend.py` for more than one query a sequence."""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

from kernels.attention import Batch
from kernels.cpu import build, geometry
from kernels.layout import PageLayout

_local = threading.local()


class PrefillCall(ctypes.Structure):
    """`kv_prefill_call` of prefill.c"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "tail", "q", "out", "table", "scales", "scratch")),
        *((name, ctypes.c_int64) for name in ("q_stride", "queries", "page_count", "tail_length")),
        *((name, ctypes.c_int32) for name in ("q_kind", "q_heads", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def _scratch(size: int) -> int:
    """Address of `size` bytes of this thread, kept from call to call: fresh memory would be paged in every time."""
    held: Tensor | None = getattr(_local, "scratch", None)
    if held is None or held.numel() < size:
        held = _local.scratch = torch.empty(size + size // 4, dtype=torch.uint8)
    return int(held.data_ptr())


def prefill(
    q: Tensor,
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    layer: int,
    batch: Batch,
    scale: float,
    window: int,
    softcap: float,
    scales: Tensor | None,
    out: Tensor,
) -> Tensor:
    """`attend` for any number of queries per sequence; writes and returns out."""
    library = build.load()
    library.kv_prefill_scratch.restype = ctypes.c_int64
    place = ctypes.byref(geometry.layers(layout)[layer])
    kind, width = geometry.DTYPES[q.dtype], q.element_size()
    per_tensor = geometry.layer_scales(layout, layer, scales)
    starts, counts = batch.query_starts.tolist(), batch.page_counts.tolist()
    lengths, slots = batch.tail_lengths.tolist(), batch.tail_slots.tolist()
    for b, count in enumerate(counts):
        if starts[b + 1] == starts[b]:
            continue
        need = library.kv_prefill_scratch(
            place, ctypes.c_int64(count), ctypes.c_int64(lengths[b]), ctypes.c_int32(kind)
        )
        call = PrefillCall(
            pages.data_ptr(),
            tails.data_ptr() + slots[b] * layout.tail_bytes if lengths[b] else None,
            q.data_ptr() + starts[b] * q.stride(0) * width,
            out.data_ptr() + starts[b] * out.stride(0) * width,
            batch.tables.data_ptr() + b * batch.tables.stride(0) * 4,
            per_tensor,
            _scratch(need),
            q.stride(0),
            starts[b + 1] - starts[b],
            count,
            lengths[b],
            kind,
            q.shape[1],
            window,
            scale,
            softcap,
        )
        library.kv_prefill(place, ctypes.byref(call))
    return out
