"""Merging partial attention results by their log-sum-exp."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def merge_kernel(
    part, lse, out, merged_lse, part_row, part_split, lse_row, lse_split, out_row,
    PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BASE2: tl.constexpr, KEEP_LSE: tl.constexpr,
):  # fmt: skip
    """One program a row of [rows, HEAD_DIM]; `lse` is in base 2 if BASE2, else natural."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PARTS_PAD)
    d = tl.arange(0, DIM_PAD)
    weight = tl.load(lse + row * lse_row + s * lse_split, mask=s < PARTS, other=float("-inf")).to(tl.float32)
    if not BASE2:
        weight = weight * 1.4426950408889634
    top = tl.max(weight, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(weight - safe)
    # an empty part is never read: its bytes may be anything
    inside = (s < PARTS)[:, None] & (weight > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    value = tl.load(part + row * part_row + (s * part_split)[:, None] + d[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    total = tl.sum(weight, axis=0)
    result = tl.sum(value * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * out_row + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
    if KEEP_LSE:
        tl.store(merged_lse + row, ((safe + tl.log2(total)) * 0.6931471805599453).to(merged_lse.dtype.element_ty))


def merge_splits(part: Tensor, lse: Tensor, out: Tensor) -> None:
    """part fp32 [T, heads, S, head_dim], base-2 lse [T, heads, S] into out [T, heads, head_dim] (rows contiguous)."""
    rows, heads, splits, dim = part.shape
    merge_kernel[(rows * heads,)](
        part, lse, out, lse, splits * dim, dim, splits, 1, out.stride(1),
        PARTS=splits, PARTS_PAD=_pad(splits), HEAD_DIM=dim, DIM_PAD=_pad(dim), BASE2=True, KEEP_LSE=False,
        enable_fp_fusion=False,
    )  # fmt: skip


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The contract of `kernels.reference.merge`."""
    parts, rows, heads, dim = outs.shape
    outs, lses = outs.contiguous(), lses.contiguous()
    out = torch.empty((rows, heads, dim), dtype=outs.dtype, device=outs.device)
    lse = torch.empty((rows, heads), dtype=lses.dtype, device=outs.device)
    merge_kernel[(rows * heads,)](
        outs, lses, out, lse, dim, rows * heads * dim, 1, rows * heads, dim,
        PARTS=parts, PARTS_PAD=_pad(parts), HEAD_DIM=dim, DIM_PAD=_pad(dim), BASE2=False, KEEP_LSE=True,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse


def _pad(value: int) -> int:
    return 1 << (value - 1).bit_length()
