"""Append tokens to tails; contract in `kernels/reference/tails.py`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kernels.cpu import build, geometry
from kernels.layout import PageLayout
from kernels.reference._pages import tail_dtype


class AppendCall(ctypes.Structure):
    """`kv_append_call` of tails.c"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tails", "slots", "positions", "k", "v")),
        *((name, ctypes.c_int64) for name in ("count", "k_stride", "v_stride")),
    ]


def append_tails(
    tails: Tensor, layout: PageLayout, layer: int, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor
) -> None:
    """Writes token i of k, v [T, kv_heads, head_dim] to `positions[i]` of tail `slots[i]` (int32 [T])."""
    dtype = tail_dtype(layout)
    k, v = geometry.rows(k.to(dtype), layout), geometry.rows(v.to(dtype), layout)
    slots, positions = geometry.ids(slots), geometry.ids(positions)
    if not k.shape[0] == v.shape[0] == slots.numel() == positions.numel():
        raise ValueError("k, v, slots and positions disagree about the number of tokens")
    call = AppendCall(
        tails.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        slots.numel(),
        k.stride(0),
        v.stride(0),
    )
    build.load().kv_append_tails(ctypes.byref(geometry.layers(layout)[layer]), ctypes.byref(call))
