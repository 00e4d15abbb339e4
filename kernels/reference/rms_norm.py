"""Root-mean-square normalisation, with the residual addition in front of it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x / rms(x) · weight over the last dimension, in float32, returned in the dtype of `weight`.

    With `residual` (same shape as x), x is first added to it in place and the sum is what gets normalised.
    """
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(weight.dtype)
