"""Views into pages and tails."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import formats
from kernels.formats._raw import Raw
from kernels.layout import PageLayout


def tail_dtype(layout: PageLayout) -> torch.dtype:
    """Element type of tails, and of layers that are not quantised."""
    found = formats.load(layout.tail_format)
    assert isinstance(found, Raw)
    return found.dtype


def side_scale(scales: Tensor | None, layer: int, side: int) -> float | None:
    """The per-tensor scale of one layer and side (0: K, 1: V) of `scales` fp32 [layers, 2]."""
    return None if scales is None else float(scales[layer, side])


def decode_layer(
    pages: Tensor, layout: PageLayout, layer: int, block_ids: Tensor, to: torch.dtype, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """K and V of some pages as [n, block_size, kv_heads, head_dim] in dtype `to`."""
    place, shape = layout.layer(layer), layout.shape
    k, v = formats.load(place.k_format), formats.load(place.v_format)
    rows = pages[block_ids.long()]

    def cut(start: int, size: int) -> Tensor:
        return rows[:, start : start + size].contiguous()

    k_sizes, v_sizes = k.sizes_k(shape), v.sizes_v(shape)
    k_parts = cut(place.k_codes, k_sizes.codes), cut(place.k_scales, k_sizes.scales)
    v_parts = cut(place.v_codes, v_sizes.codes), cut(place.v_scales, v_sizes.scales)
    return (
        k.decode_k(*k_parts, shape, to, side_scale(scales, layer, 0)),
        v.decode_v(*v_parts, shape, to, side_scale(scales, layer, 1)),
    )


def tail_views(tails: Tensor, layout: PageLayout, layer: int) -> tuple[Tensor, Tensor]:
    """Writable K and V of one layer of all tails, [slots, kv_heads, block_size, head_dim]."""
    place, shape = layout.layer(layer), layout.shape
    typed = tails.view(tail_dtype(layout))
    width = typed.element_size()
    grid = (tails.shape[0], shape.kv_heads, shape.block_size, shape.head_dim)

    def view(start: int) -> Tensor:
        return typed[:, start // width : start // width + shape.elements].view(grid)

    return view(place.tail_k), view(place.tail_v)
