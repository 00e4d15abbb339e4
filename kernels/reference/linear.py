"""Matrix product with row-major weights."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] · weight [out, in]ᵀ + bias [out], in the dtype of the weight."""
    return torch.nn.functional.linear(x, weight, bias)
