"""The small ops, and the unpacking of codes for every byte there is."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.formats._codes import E4M3, E5M2, INT8
from kernels.reference import argmax_rows as reference_argmax
from kernels.reference import merge as reference_merge
from kernels.reference import rms_norm as reference_rms_norm
from kernels.reference import rope as reference_rope
from kernels.reference import silu_mul as reference_silu_mul
from kernels.triton import _codes as codes
from kernels.triton.argmax_rows import argmax_rows
from kernels.triton.merge import merge
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rope import rope
from kernels.triton.silu_mul import silu_mul

KINDS = [torch.float32, torch.float16]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(dtype: torch.dtype, residual: bool, device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn(5, 576, generator=generator).to(dtype)
    weight = torch.randn(576, generator=generator).to(dtype)
    kept = torch.randn(5, 576, generator=generator) if residual else None
    moved = kept.clone().to(device) if kept is not None else None
    found = rms_norm(x.to(device), weight.to(device), 1e-5, moved)
    exact = reference_rms_norm.rms_norm(x, weight, 1e-5, kept)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), exact)
    if kept is not None and moved is not None:
        assert torch.equal(moved.cpu(), kept)


def test_rms_norm_of_heads_inside_a_fused_projection(device: torch.device, generator: torch.Generator) -> None:
    fused = torch.randn(4, 5, 80, generator=generator)
    weight = torch.randn(80, generator=generator)
    found = rms_norm(fused.to(device)[:, 1:3], weight.to(device), 1e-6)
    torch.testing.assert_close(found.cpu(), reference_rms_norm.rms_norm(fused[:, 1:3], weight, 1e-6))


@pytest.mark.parametrize("dtype", KINDS)
def test_rope(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    fused = torch.randn(3, 8, 80, generator=generator).to(dtype)
    angles = torch.randn(3, 40, generator=generator)
    moved = fused.clone().to(device)
    rope(moved[:, :5], moved[:, 5:7], angles.cos().to(device), angles.sin().to(device))
    reference_rope.rope(fused[:, :5], fused[:, 5:7], angles.cos(), angles.sin())
    torch.testing.assert_close(moved.cpu(), fused)
    assert torch.equal(moved[:, 7].cpu(), fused[:, 7])


@pytest.mark.parametrize("dtype", KINDS)
def test_silu_mul(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    gate_up = (torch.randn(3, 2 * 1536, generator=generator) * 20).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up.to(device)).cpu(), reference_silu_mul.silu_mul(gate_up))


def test_argmax_takes_the_lowest_id_and_says_where_nan_is(device: torch.device, generator: torch.Generator) -> None:
    logits = torch.randn(6, 9001, generator=generator)
    logits[0, [17, 4113, 9000]] = 50.0
    logits[1, [0, 9000]] = torch.tensor([torch.nan, 60.0])
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, 8999] = torch.inf
    found = argmax_rows(logits.to(device))
    assert found.cpu().tolist() == reference_argmax.argmax_rows(logits).tolist()
    assert found[:4].tolist() == [17, -1, 0, -1]


def test_merge_counts_empty_parts_as_nothing(device: torch.device, generator: torch.Generator) -> None:
    outs = torch.randn(3, 4, 2, 80, generator=generator)
    lses = torch.randn(3, 4, 2, generator=generator) * 5
    lses[1, 0], lses[:, 1] = -torch.inf, -torch.inf
    outs[1, 0] = torch.nan
    outs[:, 1] = torch.nan
    found = merge(outs.to(device), lses.to(device))
    for ours, exact in zip(found, reference_merge.merge(outs, lses), strict=True):
        torch.testing.assert_close(ours.cpu(), exact)


@triton.jit
def _decode_all(raw, out, CODE: tl.constexpr, AS: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, codes.decode(tl.load(raw + at), CODE, AS))


@triton.jit
def _nibbles(raw, out, PART: tl.constexpr, AS: tl.constexpr):
    at = tl.arange(0, 256)
    zero = tl.full([256], -3, tl.int8)
    tl.store(out + at, codes.nibble(tl.load(raw + at), PART, AS) - codes.nibble_zero(zero, AS))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("number", "code"), [(1, INT8), (2, E4M3), (3, E5M2)])
def test_every_byte_is_unpacked(number: int, code: object, dtype: torch.dtype, device: torch.device) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=dtype, device=device)
    stored = (raw.view(torch.int8) if number == 1 else raw).to(device)
    _decode_all[(1,)](stored, out, CODE=number, AS=tl.float16 if dtype == torch.float16 else tl.float32)
    exact = code.decode(raw, torch.float32)  # type: ignore[attr-defined]
    real = exact.isfinite()
    if number == 2:  # 0x7F and 0xFF, which encoders never write
        real &= (raw & 127) != 127
    assert torch.equal(out.cpu().float()[real], exact[real])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("part", [0, 1])
def test_every_pair_of_nibbles_is_unpacked(part: int, dtype: torch.dtype, device: torch.device) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=dtype, device=device)
    _nibbles[(1,)](raw.to(device), out, PART=part, AS=tl.float16 if dtype == torch.float16 else tl.float32)
    assert torch.equal(out.cpu().int(), (raw.int() >> 4 if part else raw.int() & 15) + 3)
