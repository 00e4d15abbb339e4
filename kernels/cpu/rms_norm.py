"""Root-mean-square normalisation; contract in `kernels/reference/rms_norm.py`."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import build, rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x / rms(x) · weight over the last dimension, a multiple of 16. ValueError if it cannot."""
    x = x.contiguous()
    rows.check(x, weight, *([] if residual is None else [residual]))
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError("residual must be contiguous and of the shape of x")
    out = torch.empty(x.shape, dtype=weight.dtype)
    wide, factors, n = torch.empty(x.shape), weight.float().contiguous(), x.shape[-1]
    build.load().kv_rms_norm(
        rows.address(x), rows.address(factors), rows.address(residual), rows.address(out), rows.address(wide),
        ctypes.c_int64(x.numel() // n), ctypes.c_int64(n), ctypes.c_float(eps), rows.is_bf16(x),
        rows.is_bf16(residual), rows.is_bf16(out),
    )  # fmt: skip
    return out
