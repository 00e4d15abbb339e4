"""Append tokens to tails, in the compute dtype."""

from __future__ import annotations

from torch import Tensor

from kernels.layout import PageLayout
from kernels.reference._pages import tail_views


def append_tails(
    tails: Tensor, layout: PageLayout, layer: int, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor
) -> None:
    """Writes token i of k, v [T, kv_heads, head_dim] to `positions[i]` of tail `slots[i]` (int32 [T])."""
    tail_k, tail_v = tail_views(tails, layout, layer)
    tail_k[slots.long(), :, positions.long()] = k.to(tail_k.dtype)
    tail_v[slots.long(), :, positions.long()] = v.to(tail_v.dtype)
