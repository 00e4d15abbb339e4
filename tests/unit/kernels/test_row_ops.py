"""rms_norm, rope and silu_mul: native against the plain versions in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import select

CPU, PLAIN = select("cpu"), select("reference")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (5, 576), (3, 9, 64)])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], residual_dtype: torch.dtype | None) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    residual = None if residual_dtype is None else torch.randn(shape).to(residual_dtype)
    total = x.double() if residual is None else (x.double() + residual.double()).to(residual.dtype).double()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    for ops in (CPU, PLAIN):
        kept = None if residual is None else residual.clone()
        close(ops.rms_norm(x, weight, 1e-5, kept), expected)
        if kept is not None:
            close(kept, total)


@DTYPES
def test_rope_turns_views_in_place(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 9 + 3 + 3, 64).to(dtype)
    angles = torch.randn(7, 32)
    expected = rows.double()
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    first, second = expected[:, :12].chunk(2, dim=-1)
    expected[:, :12] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    for ops in (CPU, PLAIN):
        ours = rows.clone()
        ops.rope(ours[:, :9], ours[:, 9:12], angles.cos(), angles.sin())
        close(ours, expected)


@DTYPES
def test_silu_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * 48) * 10).to(dtype)
    x[0, :4] = torch.tensor([0.0, -200.0, 200.0, -88.0])
    gate, up = x.double().chunk(2, dim=1)
    for ops in (CPU, PLAIN):
        close(ops.silu_mul(x), torch.nn.functional.silu(gate) * up)


def test_what_vectors_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        CPU.rms_norm(torch.randn(2, 20), torch.randn(20), 1e-5)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        CPU.silu_mul(torch.randn(2, 32).half())
