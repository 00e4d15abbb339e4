"""Gather: pages back to activations; copies of whole pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import PageLayout
from kernels.reference._pages import decode_layer, tail_dtype


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
    target = dtype or tail_dtype(layout)
    exact = torch.float64 if target == torch.float64 else torch.float32
    k, v = decode_layer(pages, layout, layer, block_ids, exact, scales)
    return k.flatten(0, 1).to(target), v.flatten(0, 1).to(target)


def copy_pages(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Row src_ids[i] of `src` to row dst_ids[i] of `dst`, uint8 [rows, bytes] of equal width; also for tails."""
    dst[dst_ids.long()] = src[src_ids.long()].to(dst.device)
