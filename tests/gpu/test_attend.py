"""Attention kernels against the float64 reference, every format, in poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.triton.attend import attend
from tests.support.paged import LAYER, Paged, build, i32, query, tolerance

FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel", "int4", "k16v4", "k8v4",
           "int8_per_tensor", "fp8_e4m3_per_tensor", "fp8_e5m2_per_tensor")  # fmt: skip
EDGES = (0, 1, 15, 16, 17, 33)


def check(paged: Paged, device: torch.device, group: int = 3, **options: object) -> None:
    moved = paged.to(device)
    q = query(moved, group)
    splits = options.pop("splits", 0)
    found = attend(
        q, moved.pages, moved.tails, moved.layout, LAYER, moved.batch, scale=paged.layout.head_dim**-0.5,
        scales=moved.scales, splits=splits, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    exact = paged.exact(q, scale=paged.layout.head_dim**-0.5, **options)
    worst = (found.cpu().double() - exact).abs().max().item()
    assert worst <= tolerance(paged.layout.tail_format), worst


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("compute", "head_dim", "block_size"), [("fp32", 64, 16), ("bf16", 80, 32), ("fp16", 48, 16)])
def test_decode_at_the_edges_of_pages(
    name: str, compute: str, head_dim: int, block_size: int, device: torch.device
) -> None:
    lengths = EDGES if compute == "fp32" else [block_size - 1, block_size + 1]
    check(build(name, lengths, compute=compute, head_dim=head_dim, block_size=block_size), device)


@pytest.mark.parametrize("name", ["bf16", "int8_channel", "int4"])
@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_wide_heads(name: str, head_dim: int, device: torch.device) -> None:
    check(build(name, [17, 70], head_dim=head_dim, kv_heads=1, compute="bf16"), device)


@pytest.mark.parametrize("name", ["fp32", "int8_channel"])
def test_wide_heads_in_fp32(name: str, device: torch.device) -> None:
    """Products over more channels than a thread has registers for come in runs of channels."""
    check(build(name, [17, 70], head_dim=256, kv_heads=1, compute="fp32"), device)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_groups(group: int, device: torch.device) -> None:
    check(build("int8_channel", [33, 5]), device, group=group)


@pytest.mark.parametrize("name", ["fp32", "int8", "int8_channel", "k16v4"])
def test_chunks_see_what_is_before_them(name: str, device: torch.device) -> None:
    check(build(name, [40, 33, 3], queries=[7, 33, 3]), device)


def test_chunks_of_several_tiles(device: torch.device) -> None:
    check(build("int8", [150], queries=[100], kv_heads=1), device, group=2)


@pytest.mark.parametrize("queries", [None, [1, 20, 9]])
@pytest.mark.parametrize("window", [1, 16, 21])
def test_windows(queries: list[int] | None, window: int, device: torch.device) -> None:
    check(build("int8_channel", [5, 50, 40], queries=queries, kv_heads=1), device, window=window)


def test_soft_cap(device: torch.device) -> None:
    check(build("fp32", [40, 7]), device, softcap=5.0)


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(300, 64, 5, 0), (16, 129)])
def test_splits(splits: int, lengths: tuple[int, ...], device: torch.device) -> None:
    check(build("int8", lengths, kv_heads=1), device, splits=splits)


def test_page_subsets(device: torch.device) -> None:
    paged = build("int8_channel", [83, 40])
    tables = paged.batch.tables[:, None].repeat(1, 2, 1)
    tables[0, 0, :2] = tables[0, 0, [4, 1]]
    tables[0, 1, 0] = tables[0, 1, 2]
    batch = dataclasses.replace(paged.batch, kv_head_tables=tables, kv_head_counts=i32([[2, 1], [0, 2]]))
    check(dataclasses.replace(paged, batch=batch), device)


def test_log_sum_exp_of_pages(device: torch.device) -> None:
    paged = build("int8_channel", [83, 5, 32])
    moved = paged.to(device)
    q = query(moved, 3)
    shape = (3, q.shape[1], paged.batch.max_pages)
    found, exact = torch.empty(shape, device=device), torch.empty(shape)
    attend(q, moved.pages, moved.tails, moved.layout, LAYER, moved.batch, scale=0.125, page_lse=found)
    paged.exact(q, scale=0.125, page_lse=exact)
    torch.testing.assert_close(found.cpu(), exact, rtol=1e-5, atol=1e-5)


def test_pages_beyond_two_gigabytes(device: torch.device) -> None:
    paged = build("int8", [40])
    far = 2**31 // paged.layout.page_bytes + 3
    pages = torch.empty((far + 3, paged.layout.page_bytes), dtype=torch.uint8, device=device)
    for place, page in enumerate(paged.batch.tables[0, :2].tolist()):
        pages[far + place] = paged.pages[page].to(device)
    moved = paged.to(device)
    q = query(moved, 2)
    near = attend(q, moved.pages, moved.tails, moved.layout, LAYER, moved.batch, scale=0.125)
    tables = torch.tensor([[far, far + 1]], dtype=torch.int32, device=device)
    batch = dataclasses.replace(moved.batch, tables=tables)
    assert torch.equal(near, attend(q, pages, moved.tails, moved.layout, LAYER, batch, scale=0.125))


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    paged = build("int8_channel", [83, 40, 7]).to(device)
    q = query(paged, 3)
    both = attend(q, paged.pages, paged.tails, paged.layout, LAYER, paged.batch, scale=0.125, splits=2)
    batch = dataclasses.replace(
        paged.batch,
        tables=paged.batch.tables[1:2],
        page_counts=paged.batch.page_counts[1:2],
        tail_slots=paged.batch.tail_slots[1:2],
        tail_lengths=paged.batch.tail_lengths[1:2],
        query_starts=paged.batch.query_starts[:2],
    )
    alone = attend(q[1:2], paged.pages, paged.tails, paged.layout, LAYER, batch, scale=0.125, splits=2)
    assert torch.equal(both[1:2], alone)


def test_scales_that_outlive_a_page_must_be_given(device: torch.device) -> None:
    paged = build("int8_per_tensor", [20]).to(device)
    with pytest.raises(ValueError, match="kv_scales_path"):
        attend(query(paged, 1), paged.pages, paged.tails, paged.layout, LAYER, paged.batch, scale=1.0)
