"""Every KV format, whatever its file: sizes, stated bounds, exact zeros, and bytes that do not depend on the call."""

from __future__ import annotations

import pytest
import torch

from kernels import formats
from kernels.dispatch import select
from kernels.formats import Shape
from kernels.layout import page_layout
from tests.support import kv_cases
from tests.support.kv_cases import i32

NAMES = formats.names()
SHAPES = [Shape(16, 3, 64), Shape(32, 2, 80), Shape(16, 1, 96), Shape(32, 2, 128), Shape(16, 1, 256)]
SCALE = 0.07
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def hard_pages(shape: Shape) -> torch.Tensor:
    """Ordinary, all zero, one channel x100, tiny, one constant channel, large."""
    x = torch.randn(6, shape.block_size, shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(1))
    x[1] = 0
    x[2, ..., 5] *= 100
    x[3] *= 1e-6
    x[4, ..., 7] = 20.0
    x[5] *= 300
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_stays_within_the_stated_bound(name: str, shape: Shape) -> None:
    found, x = formats.load(name), hard_pages(shape)
    for side in "kv":
        sizes = getattr(found, f"sizes_{side}")(shape)
        codes, scales = getattr(found, f"encode_{side}")(x, SCALE)
        assert (codes.shape[1], scales.shape[1]) == tuple(sizes)
        back = getattr(found, f"decode_{side}")(codes, scales, shape, torch.float64, SCALE)
        bound = getattr(found, f"bound_{side}")(x.double(), SCALE)
        assert ((back - x).abs() <= bound + 1e-6 * x.abs()).all()
        assert (back[1] == 0).all()


@pytest.mark.parametrize("tail", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_native_bytes_are_the_references_bytes(name: str, tail: str) -> None:
    for shape in SHAPES:
        layout = page_layout(name, name, *_geometry(shape), tail_format=tail)
        x = hard_pages(shape).clamp(-6e4, 6e4).to(DTYPES[tail]).flatten(0, 1)
        ids, scales = i32(4, 1, 0, 5, 7, 2), kv_cases.per_tensor_scales(2)
        written = []
        for backend in ("reference", "cpu"):
            pages = torch.zeros(8, layout.page_bytes, dtype=torch.uint8)
            select(backend).seal(pages, layout, 1, x, x.flip(0), ids, scales)
            written.append(pages)
        assert torch.equal(*written)


@pytest.mark.parametrize("tail", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_what_no_code_can_hold_saturates_to_the_same_bytes(name: str, tail: str) -> None:
    layout, x = page_layout(name, name, 16, 1, 1, 64, tail_format=tail), torch.randn(5 * 16, 1, 64)
    for page, huge in enumerate((1e5, -3e30, torch.inf, -torch.inf)):
        x[16 * page + 3, 0, 7] = huge
    x[4 * 16 :] = -3e38
    x, ids, written = x.to(DTYPES[tail]), torch.arange(5, dtype=torch.int32), []
    if tail == "fp16":
        x[4 * 16 :] = torch.finfo(torch.float16).min  # a page of nothing but infinity has no scale
    for backend in ("reference", "cpu"):
        pages = torch.zeros(5, layout.page_bytes, dtype=torch.uint8)
        select(backend).seal(pages, layout, 0, x, x, ids, kv_cases.per_tensor_scales(1))
        written.append(pages)
    assert torch.equal(*written)
    given = {"dtype": torch.float32, "scales": kv_cases.per_tensor_scales(1)}
    k, v = select("reference").gather(written[0], layout, 0, ids, **given)
    if name != "fp32":  # stores what comes
        assert torch.stack((k, v)).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_how_sealing_was_called(name: str, backend: str) -> None:
    ops, shape = select(backend), Shape(16, 3, 64)
    layout = page_layout(name, name, *_geometry(shape))
    x = hard_pages(shape).clamp(-6e4, 6e4).bfloat16().flatten(0, 1)
    scales, pages = kv_cases.per_tensor_scales(2), []
    for cut in (1, 4, 6):
        pool = torch.zeros(6, layout.page_bytes, dtype=torch.uint8)
        for layer in range(2):
            for first in range(0, 6, cut):
                part = x[first * 16 : (first + cut) * 16]
                ids = torch.arange(first, min(first + cut, 6), dtype=torch.int32)
                ops.seal(pool, layout, layer, part, part, ids, scales)
        pages.append(pool)
    pool, tails = torch.zeros_like(pages[0]), torch.zeros(6, layout.tail_bytes, dtype=torch.uint8)
    slots = torch.arange(6, dtype=torch.int32)
    for layer in range(2):
        for token in range(16):
            part = x[token::16]
            ops.append_tails(tails, layout, layer, part, part, slots, torch.full((6,), token, dtype=torch.int32))
    ops.seal_tails(pool, tails, layout, slots, slots, scales)
    assert all(torch.equal(pool, other) for other in pages)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_gather_returns_what_was_sealed(name: str, backend: str) -> None:
    layout = page_layout(name, "int8", 32, 2, 2, 80, tail_format="fp32")
    case = kv_cases.build(layout, [160], layer=1)
    ids = case.batch.tables[0, :5]
    k, v = select(backend).gather(case.pages, layout, 1, ids, dtype=torch.float32, scales=case.scales)
    scale = float(case.scales[1, 0])
    paged = case.k[0].view(5, 32, 2, 80)
    bound = formats.load(name).bound_k(paged, scale) + 1e-6 * paged.abs()
    assert ((k.view_as(paged) - paged).abs() <= bound).all()
    assert ((v - case.v[0]).abs() <= formats.load("int8").bound_v(case.v[0]) * (1 + 1e-5)).all()


def test_a_key_channel_times_100_hurts_per_channel_scales_least() -> None:
    shape, x = Shape(16, 3, 64), torch.randn(32, 16, 3, 64, generator=torch.Generator().manual_seed(2))
    x[..., 5] *= 100
    q = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    q[:, 5] = 0  # the error that reaches the other channels
    error = {}
    for name in ("int8_channel", "int8", "int8_per_tensor", "int4"):
        scale = float(x.abs().max()) / 127
        found = formats.load(name)
        back = found.decode_k(*found.encode_k(x, scale), shape, torch.float32, scale)
        error[name] = float((((back - x) * q).sum(-1)).square().mean().sqrt())
    assert error["int8_channel"] * 4 <= error["int8"] <= error["int8_per_tensor"]
    assert error["int8_channel"] * 4 <= error["int8_per_tensor"]
    assert error["int4"] < error["int8_per_tensor"]


def test_copies_of_pages_are_whole_and_go_where_they_should() -> None:
    for backend in ("reference", "cpu"):
        source = torch.randint(0, 255, (5, 4096), dtype=torch.uint8)
        target = torch.zeros(4, 4096, dtype=torch.uint8)
        select(backend).copy_pages(source, target, i32(4, 0), i32(1, 3))
        assert torch.equal(target[[1, 3]], source[[4, 0]]) and not target[[0, 2]].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_per_tensor_format_without_scales_is_refused(backend: str) -> None:
    layout = page_layout("int8_per_tensor", "int8_per_tensor", 16, 2, 1, 64)
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    tails = torch.zeros(1, layout.tail_bytes, dtype=torch.uint8)
    x = torch.zeros(16, 1, 64)
    with pytest.raises(ValueError, match="kv_scales_path"):
        select(backend).seal(pages, layout, 0, x, x, i32(0))
    with pytest.raises(ValueError, match="kv_scales_path"):
        select(backend).seal_tails(pages, tails, layout, i32(0), i32(0))


def _geometry(shape: Shape) -> tuple[int, int, int, int]:
    return shape.block_size, 2, shape.kv_heads, shape.head_dim
