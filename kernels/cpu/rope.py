"""Rotary positions; contract in `kernels/reference/rope.py`."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import build, rows


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns q and k [T, heads, head_dim] in place; float32 or bfloat16, head_dim a multiple of 16 up to 512."""
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    for x in (q, k):
        rows.check(x)
        tokens, heads, dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != dim or dim > 512 or cos.shape != (tokens, dim // 2):
            raise ValueError(f"rope takes contiguous heads of up to 512 channels, not {tuple(x.shape)}")
        build.load().kv_rope(
            rows.address(x), rows.address(cos), rows.address(sin), ctypes.c_int64(tokens), ctypes.c_int64(x.stride(0)),
            ctypes.c_int64(heads), ctypes.c_int64(dim), rows.is_bf16(x),
        )  # fmt: skip
