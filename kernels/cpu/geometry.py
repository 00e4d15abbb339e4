"""The C view of a page: `kv_layer` of attend.h, built once per layout and layer."""

from __future__ import annotations

import ctypes

import torch

from kernels import formats
from kernels.formats import Sizes
from kernels.layout import PageLayout

KINDS = {"fp32": 0, "bf16": 1, "fp16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5, "int8_channel": 5, "int4": 6}
"""`enum kv_kind` by format, without `_per_tensor`."""
NONE, PER_TOKEN, PER_CHANNEL, PER_TENSOR = range(4)
"""`enum kv_scaling`"""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`enum kv_kind` of activations."""


class Side(ctypes.Structure):
    """`kv_side`"""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("codes", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("head_codes", ctypes.c_int64),
        ("head_scales", ctypes.c_int64),
    ]


class Layer(ctypes.Structure):
    """`kv_layer`"""

    _fields_ = [
        ("k", Side),
        ("v", Side),
        ("page_bytes", ctypes.c_int64),
        ("tail_bytes", ctypes.c_int64),
        ("tail_k", ctypes.c_int64),
        ("tail_v", ctypes.c_int64),
        ("tail_kind", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    ]


_layers: dict[int, tuple[PageLayout, ctypes.Array[Layer]]] = {}


def layers(layout: PageLayout) -> ctypes.Array[Layer]:
    """All layers of a layout as one C array. Kept by identity: hashing a layout costs more than an attention call."""
    found = _layers.get(id(layout))
    if found is None:
        each = (_layer(layout, index) for index in range(layout.layers))
        found = _layers[id(layout)] = (layout, (Layer * layout.layers)(*each))
    return found[1]


def _layer(layout: PageLayout, index: int) -> Layer:
    place, shape = layout.layer(index), layout.shape
    k_sizes = formats.load(place.k_format).sizes_k(shape)
    v_sizes = formats.load(place.v_format).sizes_v(shape)
    k_scaling = PER_CHANNEL if place.k_format in ("int8_channel", "int4") else _scaling(place.k_format)
    return Layer(
        _side(place.k_format, k_scaling, place.k_codes, place.k_scales, k_sizes, shape.kv_heads),
        _side(place.v_format, _scaling(place.v_format), place.v_codes, place.v_scales, v_sizes, shape.kv_heads),
        layout.page_bytes,
        layout.tail_bytes,
        place.tail_k,
        place.tail_v,
        KINDS[layout.tail_format],
        shape.block_size,
        shape.kv_heads,
        shape.head_dim,
    )


def _scaling(name: str) -> int:
    if name in ("bf16", "fp16", "fp32"):
        return NONE
    return PER_TENSOR if name.endswith("_per_tensor") else PER_TOKEN


def _side(name: str, scaling: int, codes: int, scales: int, sizes: Sizes, heads: int) -> Side:
    kind = KINDS[name.removesuffix("_per_tensor")]
    return Side(kind, scaling, codes, scales, sizes.codes // heads, sizes.scales // heads)


def layer_scales(layout: PageLayout, layer: int, scales: torch.Tensor | None) -> int | None:
    """Address of the K and V scale of one layer in fp32 [layers, 2], or None. ValueError if a format needs them."""
    layout.layer(layer).check_scales(scales is not None)
    if scales is None:
        return None
    if scales.dtype != torch.float32 or scales.shape != (layout.layers, 2) or not scales.is_contiguous():
        raise ValueError(f"scales must be contiguous fp32 [{layout.layers}, 2]")
    return int(scales.data_ptr()) + layer * 8


def ids(indices: torch.Tensor) -> torch.Tensor:
    """Indices as the kernels read them: contiguous int32."""
    return indices.to(torch.int32).contiguous()


def rows(x: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """x [T, kv_heads, head_dim] with adjacent heads (any stride between tokens); ValueError for another shape."""
    if x.dim() != 3 or x.shape[1:] != (layout.kv_heads, layout.head_dim) or x.dtype not in DTYPES:
        raise ValueError(f"activations must be [T, {layout.kv_heads}, {layout.head_dim}] in fp32, bf16 or fp16")
    return x if x.stride(2) == 1 and x.stride(1) == layout.head_dim else x.contiguous()
