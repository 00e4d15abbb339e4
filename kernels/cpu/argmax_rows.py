"""Greedy choice; contract in `kernels/reference/argmax_rows.py`."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import build


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """int32 [rows] of contiguous float32 [rows, columns]. ValueError for anything else."""
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or not logits.is_contiguous() or not logits.shape[1]:
        raise ValueError(f"logits must be contiguous float32 with columns, not {logits.dtype} {tuple(logits.shape)}")
    best = torch.empty(logits.shape[0], dtype=torch.int32)
    build.load().kv_argmax_rows(
        ctypes.c_void_p(logits.data_ptr()), ctypes.c_int64(logits.shape[0]), ctypes.c_int64(logits.shape[1]),
        ctypes.c_void_p(best.data_ptr()),
    )  # fmt: skip
    return best
