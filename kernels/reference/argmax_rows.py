"""Greedy choice."""

from __future__ import annotations

import torch


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """int32 [rows]: the lowest index of the largest of each row of float32 [rows, columns]; -1 where one is NaN."""
    best = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return best.masked_fill(logits.isnan().any(dim=1), -1).int()
