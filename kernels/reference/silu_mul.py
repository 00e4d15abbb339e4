"""The gate of a gated feed-forward layer."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, in float32; gate_up [T, 2·n] holds all gates, then all ups; returns [T, n] in its dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
