"""Root-mean-square normalisation with the residual addition in front of it: one program a row, one pass over memory."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(x, residual, weight, out, rows, outer, inner, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
                    RESIDUAL: tl.constexpr):  # fmt: skip
    """Row i of x is at (i // rows) * outer + (i % rows) * inner; residual and out are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < WIDTH
    value = tl.load(x + row // rows * outer + row % rows * inner + d, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        kept = residual + row * WIDTH + d
        held = (tl.load(kept, mask=inside, other=0.0).to(tl.float32) + value).to(residual.dtype.element_ty)
        tl.store(kept, held, mask=inside)
        value = held.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + d, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The contract of `kernels.reference.rms_norm`; x [T, n] or [T, heads, n], the last dimension contiguous.

    `residual` must be contiguous.
    """
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or (residual is not None and not residual.is_contiguous()):
        raise ValueError("rms_norm takes [T, n] or [T, heads, n] with contiguous rows, and a contiguous residual")
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    inner = x.shape[1] if x.dim() == 3 else 1
    if x.numel():
        pad = 1 << (width - 1).bit_length()
        rms_norm_kernel[(x.numel() // width,)](
            x, x if residual is None else residual, weight, out, inner, x.stride(0), x.stride(1) if inner > 1 else 0,
            eps, WIDTH=width, WIDTH_PAD=pad, RESIDUAL=residual is not None, num_warps=4 if pad <= 4096 else 8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
