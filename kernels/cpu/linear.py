"""Products with packed weights. The engine's whole step (`step.c`) calls the same C code; `linear` runs one alone.

Not an op of `kernels.dispatch`: other backends have no packed weights.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.cpu import build, packing


class CLinear(ctypes.Structure):
    """`kv_linear` of linear.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class CRows(ctypes.Structure):
    """`kv_rows` of linear.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
    )


@dataclass(frozen=True)
class PackedLinear:
    """A weight [out, in] in the panels of `kernels.cpu.packing`; `data` must start at a multiple of 64 bytes."""

    format: int
    out: int
    inputs: int
    data: torch.Tensor
    bias: torch.Tensor | None = None
    """float32 [out]"""
    gated: bool = False

    def struct(self) -> CLinear:
        """The C view; valid while this object lives."""
        if self.data.data_ptr() % 64 or tuple(self.data.shape) != packing.packed_shape(
            self.format, self.out, self.inputs, self.gated
        ):
            raise ValueError(f"packed weight {tuple(self.data.shape)} is misaligned or not of {self.out}x{self.inputs}")
        bias = None if self.bias is None else self.bias.data_ptr()
        return CLinear(self.format, self.out, self.inputs, self.gated, self.data.data_ptr(), bias)


def _rows(x: torch.Tensor, keep: list[torch.Tensor]) -> CRows:
    rows, columns = x.shape
    sums = torch.empty(rows, columns // packing.GROUP)
    keep += [x, sums]
    result = CRows(x.data_ptr(), sums.data_ptr(), rows, columns, x.dtype == torch.bfloat16)
    for row in range(rows):
        build.load().kv_rows_sum(ctypes.byref(result), ctypes.c_int64(row))
    return result


def linear(x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
    """x [T, in] (float32; bfloat16 is widened where the ISA or the format has no bf16 product) times the weight.

    Returns float32 [T, out]; for a gated weight silu(gate) · up [T, out/2] in the dtype multiplied.
    """
    library = build.load()
    if x.dtype == torch.bfloat16 and (weight.format == packing.F32 or not library.kv_has_bf16_dot()):
        x = x.float()
    keep: list[torch.Tensor] = []
    source = _rows(x.contiguous(), keep)
    if weight.gated:
        y = torch.zeros(x.shape[0], -(-weight.out // 2 // packing.GROUP) * packing.GROUP, dtype=x.dtype)
        target = CRows(y.data_ptr(), None, y.shape[0], y.shape[1], x.dtype == torch.bfloat16)
        library.kv_linear_run(ctypes.byref(weight.struct()), ctypes.byref(source), 0, None, ctypes.c_int64(0),
                              ctypes.byref(target))  # fmt: skip
        return y[:, : weight.out // 2]
    y = torch.empty(x.shape[0], weight.out)
    library.kv_linear_run(ctypes.byref(weight.struct()), ctypes.byref(source), 0, ctypes.c_void_p(y.data_ptr()),
                          ctypes.c_int64(weight.out), None)  # fmt: skip
    return y
