"""Seal: turn full-precision activations into pages. A page is written once, whole, and never re-quantised."""

from __future__ import annotations

from torch import Tensor

from kernels import formats
from kernels.layout import PageLayout
from kernels.reference._pages import side_scale, tail_views


def seal(
    pages: Tensor,
    layout: PageLayout,
    layer: int,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Writes one layer of n pages. k, v [n * block_size, kv_heads, head_dim]; block_ids int32 [n].

    `scales` fp32 [layers, 2] (K, V) where a format's scale outlives a page; ValueError without.
    """
    place, shape = layout.layer(layer), layout.shape
    grid = (-1, shape.block_size, shape.kv_heads, shape.head_dim)
    rows = block_ids.long()
    k_parts = formats.load(place.k_format).encode_k(k.reshape(grid), side_scale(scales, layer, 0))
    v_parts = formats.load(place.v_format).encode_v(v.reshape(grid), side_scale(scales, layer, 1))
    starts = (place.k_codes, place.k_scales, place.v_codes, place.v_scales)
    for start, part in zip(starts, (*k_parts, *v_parts), strict=True):
        pages[rows, start : start + part.shape[1]] = part


def seal_tails(
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    slots: Tensor,
    block_ids: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Seals full tails (block_size tokens) into pages, all layers. slots, block_ids int32 [n]."""
    rows = slots.long()
    for layer in range(layout.layers):
        k, v = (side[rows].permute(0, 2, 1, 3).flatten(0, 1) for side in tail_views(tails, layout, layer))
        seal(pages, layout, layer, k, v, block_ids, scales)
