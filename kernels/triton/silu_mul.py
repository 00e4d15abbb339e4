"""The gate of a gated feed-forward layer."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Grid (T, blocks of the width)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    gate = tl.load(gate_up + row * 2 * width + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + d, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + d, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The contract of `kernels.reference.silu_mul`, for contiguous [T, 2·n]."""
    if gate_up.dim() != 2 or not gate_up.is_contiguous():
        raise ValueError("silu_mul takes a contiguous [T, 2·n]")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        silu_mul_kernel[(rows, -(-width // BLOCK))](gate_up, out, width, BLOCK=BLOCK, enable_fp_fusion=False)
    return out
