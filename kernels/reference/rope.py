"""Rotary positions in rotate-half order: channel i turns with channel i + head_dim/2."""

from __future__ import annotations

import torch


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns q [T, q_heads, head_dim] and k [T, kv_heads, head_dim] in place; cos, sin float32 [T, head_dim/2]."""
    cos, sin = cos[:, None], sin[:, None]
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
