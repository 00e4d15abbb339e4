"""Greedy choice: the lowest index of the largest value, or -1 where there is NaN."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def argmax_kernel(logits, out, row_stride, columns, BLOCK: tl.constexpr):
    """One program a row. Each lane keeps its first maximum; the lowest index among the lanes' best wins."""
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = lane
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        at = start + lane
        value = tl.load(row + at, mask=at < columns, other=float("-inf"))
        better = value > best  # never true of NaN
        best = tl.where(better, value, best)
        index = tl.where(better, at, index)
        broken = tl.where(value != value, 1, broken)
    top = tl.max(best, axis=0)
    found = tl.min(tl.where(best == top, index, 0x7FFFFFFF), axis=0)
    tl.store(out + tl.program_id(0), tl.where(tl.max(broken, axis=0) > 0, -1, found))


def argmax_rows(logits: Tensor) -> Tensor:
    """The contract of `kernels.reference.argmax_rows`."""
    rows, columns = logits.shape
    if logits.stride(1) != 1 or logits.dtype != torch.float32:
        raise ValueError("argmax_rows takes float32 rows with contiguous columns")
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        argmax_kernel[(rows,)](logits, out, logits.stride(0), columns, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False)
    return out
