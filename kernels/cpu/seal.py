"""Seal activations and full tails into pages; contract in `kernels/reference/seal.py`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kernels.cpu import build, geometry
from kernels.layout import PageLayout


class SealCall(ctypes.Structure):
    """`kv_seal_call` of seal.c"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "ids", "k", "v", "scales")),
        *((name, ctypes.c_int64) for name in ("count", "k_stride", "v_stride")),
        ("kind", ctypes.c_int32),
    ]


def seal(
    pages: Tensor,
    layout: PageLayout,
    layer: int,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Writes one layer of n pages. k, v [n * block_size, kv_heads, head_dim]; block_ids int32 [n]."""
    k, v = geometry.rows(k, layout), geometry.rows(v, layout)
    if k.shape[0] != block_ids.numel() * layout.block_size or k.dtype != v.dtype or k.shape != v.shape:
        raise ValueError(f"k and v must be {block_ids.numel() * layout.block_size} tokens of one dtype")
    ids = geometry.ids(block_ids)
    call = SealCall(
        pages.data_ptr(),
        ids.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        geometry.layer_scales(layout, layer, scales),
        ids.numel(),
        k.stride(0),
        v.stride(0),
        geometry.DTYPES[k.dtype],
    )
    build.load().kv_seal(ctypes.byref(geometry.layers(layout)[layer]), ctypes.byref(call))


def seal_tails(
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    slots: Tensor,
    block_ids: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Seals full tails (block_size tokens) into pages, all layers. slots, block_ids int32 [n]."""
    slots, ids = geometry.ids(slots), geometry.ids(block_ids)
    if slots.numel() != ids.numel():
        raise ValueError("as many slots as pages")
    quantised = next((layer for layer in range(layout.layers) if layer not in layout.skip_layers), 0)
    layout.layer(quantised).check_scales(scales is not None)
    build.load().kv_seal_tails(
        geometry.layers(layout),
        ctypes.c_int64(layout.layers),
        ctypes.c_void_p(pages.data_ptr()),
        ctypes.c_void_p(tails.data_ptr()),
        ctypes.c_void_p(slots.data_ptr()),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_int64(ids.numel()),
        ctypes.c_void_p(geometry.layer_scales(layout, 0, scales)),
    )
