"""The gate of a gated feed-forward layer; contract in `kernels/reference/silu_mul.py`."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import build, rows


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of [T, 2·n]; float32 or bfloat16, n a multiple of 16."""
    gate_up = gate_up.contiguous()
    rows.check(gate_up[:, : gate_up.shape[1] // 2])
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    build.load().kv_silu_mul_rows(
        rows.address(gate_up), rows.address(out), ctypes.c_int64(out.shape[0]), ctypes.c_int64(out.shape[1]),
        rows.is_bf16(out),
    )  # fmt: skip
    return out
