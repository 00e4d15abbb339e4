"""Rotary positions in rotate-half order, in place, queries and keys in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_kernel(q, k, cos, sin, q_row, q_head, k_row, k_head, q_heads, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Grid (T, q_heads + kv_heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, HALF_PAD)
    inside = d < HALF
    turn_cos = tl.load(cos + row * HALF + d, mask=inside, other=0.0)
    turn_sin = tl.load(sin + row * HALF + d, mask=inside, other=0.0)
    if head < q_heads:
        _turn(q + row * q_row + head * q_head + d, turn_cos, turn_sin, inside, HALF)
    else:
        _turn(k + row * k_row + (head - q_heads) * k_head + d, turn_cos, turn_sin, inside, HALF)


@triton.jit
def _turn(place, turn_cos, turn_sin, inside, HALF: tl.constexpr):
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * turn_cos - second * turn_sin).to(place.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * turn_cos + first * turn_sin).to(place.dtype.element_ty), mask=inside)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The contract of `kernels.reference.rope`; cos and sin contiguous, the last dimension of q and k too."""
    rows, q_heads, dim = q.shape
    if q.stride(2) != 1 or k.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("rope takes q and k with contiguous channels, and contiguous cos and sin")
    if rows:
        half = dim // 2
        rope_kernel[(rows, q_heads + k.shape[1])](
            q, k, cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), q_heads,
            HALF=half, HALF_PAD=1 << (half - 1).bit_length(), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
