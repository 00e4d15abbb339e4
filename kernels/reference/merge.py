"""Merge partial attention results by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges S partials: outs [S, T, heads, head_dim], lses [S, T, heads] -> out [T, heads, head_dim], lse [T, heads].

    M = max lse, weight exp(lse - M). An empty partial is (anything, -inf) and counts as nothing; if all are empty the
    result is (0, -inf).
    """
    exact = torch.float64 if outs.dtype == torch.float64 else torch.float32
    top = lses.to(exact).amax(dim=0)
    base = torch.where(top.isinf(), torch.zeros_like(top), top)
    weights = (lses.to(exact) - base).exp()
    total = weights.sum(dim=0)
    held = torch.where(weights.unsqueeze(-1) > 0, outs.to(exact), 0.0)
    out = (held * weights.unsqueeze(-1)).sum(dim=0) / total.clamp(min=torch.finfo(exact).tiny).unsqueeze(-1)
    return out.to(outs.dtype), (base + total.log()).to(lses.dtype)
