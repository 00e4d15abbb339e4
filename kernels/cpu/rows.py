"""What the ops on rows accept, and how their arguments cross into C."""

from __future__ import annotations

import ctypes

import torch


def check(*tensors: torch.Tensor) -> None:
    """ValueError unless each is float32 or bfloat16 with a last dimension that is a multiple of 16."""
    for x in tensors:
        if x.dtype not in (torch.float32, torch.bfloat16) or x.shape[-1] % 16 or not x.shape[-1]:
            raise ValueError(f"needs float32 or bfloat16 rows of a multiple of 16, not {x.dtype} {tuple(x.shape)}")


def address(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def is_bf16(x: torch.Tensor | None) -> ctypes.c_int32:
    return ctypes.c_int32(x is not None and x.dtype == torch.bfloat16)
