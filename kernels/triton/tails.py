"""Appending tokens to tails: both sides in one launch, positions read on the device."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import PageLayout
from kernels.triton._formats import RAW_TYPES


@triton.jit
def append_kernel(
    k, v, tails, slots, positions, k_row, k_head, v_row, v_head, tail_offset,
    TAIL_BYTES: tl.constexpr, TAIL_V: tl.constexpr, TAIL_RAW: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (T, KV_HEADS). A negative slot is nobody's: padding of a captured step."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    inside = d < tl.where(slot >= 0, HEAD_DIM, 0)
    own = tails + slot * TAIL_BYTES + tail_offset
    place = (head * BLOCK_SIZE + tl.load(positions + row)) * HEAD_DIM + d
    key = tl.load(k + row * k_row + head * k_head + d, mask=inside, other=0.0)
    tl.store(own.to(tl.pointer_type(TAIL_RAW)) + place, key.to(TAIL_RAW), mask=inside)
    value = tl.load(v + row * v_row + head * v_head + d, mask=inside, other=0.0)
    tl.store((own + TAIL_V).to(tl.pointer_type(TAIL_RAW)) + place, value.to(TAIL_RAW), mask=inside)


def append_tails(
    tails: Tensor, layout: PageLayout, layer: int, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor
) -> None:
    """The contract of `kernels.reference.tails`; the last dimension of k and v must be contiguous.

    Rows with a negative slot are left out.
    """
    place, dim = layout.layer(layer), layout.head_dim
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("append_tails takes k and v with contiguous channels")
    if k.shape[0]:
        append_kernel[(k.shape[0], layout.kv_heads)](
            k, v, tails, slots, positions, k.stride(0), k.stride(1), v.stride(0), v.stride(1), place.tail_k,
            TAIL_BYTES=layout.tail_bytes, TAIL_V=place.tail_v - place.tail_k, TAIL_RAW=RAW_TYPES[layout.tail_format],
            HEAD_DIM=dim, DIM_PAD=1 << (dim - 1).bit_length(), BLOCK_SIZE=layout.block_size, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
