"""Products with packed weights: right against float64, and independent of the rows beside a row."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.cpu import build, packing
from kernels.cpu.linear import PackedLinear, linear

FORMATS = {"f32": packing.F32, "bf16": packing.BF16, "q8": packing.Q8, "q4": packing.Q4}


ROWS = [1, 17] if os.environ.get("KVRELAY_CPU_ISA") else [1, 5, 17, 195]


@pytest.fixture(autouse=True)
def two_threads() -> None:
    build.set_threads(2)


def aligned(packed: torch.Tensor) -> torch.Tensor:
    """A copy that starts at a multiple of 64 bytes."""
    room = torch.empty(packed.numel() + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + packed.numel()].view(packed.shape).copy_(packed)


def weight(kind: str, out: int, columns: int, gated: bool = False) -> tuple[PackedLinear, torch.Tensor]:
    """A random packed weight and what it means in float64."""
    groups = columns // 32
    if kind == "q4":
        codes = torch.randint(0, 256, (out, columns // 2), dtype=torch.uint8)
        scale, minimum = (torch.rand(out, groups) * 0.1).half(), (torch.randn(out, groups) * 0.1).half()
        packed = packing.pack_q4(codes, scale, minimum, gated)
        nibbles = torch.stack((codes & 15, codes >> 4), 2).view(out, groups, 32).double()
        dense = (nibbles * scale.double()[..., None] + minimum.double()[..., None]).flatten(1)
    elif kind == "q8":
        codes = torch.randint(-127, 128, (out, columns), dtype=torch.int8)
        scale = (torch.rand(out, groups) * 0.01).half()
        packed = packing.pack_q8(codes, scale, gated)
        dense = (codes.view(out, groups, 32).double() * scale.double()[..., None]).flatten(1)
    else:
        values = torch.randn(out, columns).to(torch.float32 if kind == "f32" else torch.bfloat16)
        packed, dense = packing.pack_dense(values, gated), values.double()
    return PackedLinear(FORMATS[kind], out, columns, aligned(packed), gated=gated), dense


def inputs(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns).to(dtype)


CASES = [
    (kind, dtype)
    for kind in FORMATS
    for dtype in (torch.float32, torch.bfloat16)
    if not (kind == "f32" and dtype == torch.bfloat16)
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize(("out", "columns"), [(192, 576), (576, 1536), (50, 64), (1, 32), (33, 1184)])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_float64(kind: str, dtype: torch.dtype, out: int, columns: int, rows: int) -> None:
    packed, dense = weight(kind, out, columns)
    x = inputs(rows, columns, dtype)
    expected = x.double() @ dense.T
    size = x.double().abs() @ dense.abs().T
    error = (linear(x, packed).double() - expected).abs()
    assert (error <= size * 2e-6 + 1e-6).all()


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_gated(kind: str, dtype: torch.dtype) -> None:
    packed, dense = weight(kind, 2 * 48, 64, gated=True)
    x = inputs(7, 64, dtype) * 0.1
    gate, up = (x.double() @ dense.T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    rounding = 2**-8 if dtype == torch.bfloat16 and linear(x, packed).dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(linear(x, packed).double(), expected, rtol=rounding, atol=1e-4)


def test_bias() -> None:
    packed, dense = weight("q4", 70, 64)
    bias = torch.randn(70)
    packed = PackedLinear(packed.format, 70, 64, packed.data, bias)
    x = inputs(3, 64, torch.float32)
    torch.testing.assert_close(linear(x, packed).double(), x.double() @ dense.T + bias.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_never_depends_on_the_others(kind: str, dtype: torch.dtype, threads: int) -> None:
    packed, _ = weight(kind, 100, 1184)
    x = inputs(400, 1184, dtype)
    whole = linear(x, packed)
    build.set_threads(threads)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 32, 193):
        assert torch.equal(linear(x[:rows], packed), whole[:rows])
        assert torch.equal(linear(x[-rows:], packed), whole[-rows:])


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_lesser_instruction_sets(isa: str) -> None:
    """This file again, in a process that is built for a lesser CPU."""
    if os.environ.get("KVRELAY_CPU_ISA"):
        pytest.skip("already inside")
    flags = {"avx512": "avx512vl", "avx2": "avx2"}.get(isa, "")
    with open("/proc/cpuinfo") as cpuinfo:
        if flags not in cpuinfo.read():
            pytest.skip(f"this CPU has no {isa}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "KVRELAY_CPU_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_weight_that_vectors_cannot_load_is_refused() -> None:
    packed, _ = weight("q4", 64, 64)
    room = torch.empty(packed.data.numel() + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + 16
    shifted = room[start : start + packed.data.numel()].view(packed.data.shape)
    with pytest.raises(ValueError, match="misaligned"):
        PackedLinear(packed.format, 64, 64, shifted).struct()


def test_wrong_shape_is_refused() -> None:
    packed, _ = weight("q4", 64, 64)
    with pytest.raises(ValueError, match="64x128"):
        PackedLinear(packed.format, 64, 128, packed.data).struct()
