"""Decode over pages that sequences share: read from the first member's table only, and right for every member."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from kernels.attention import Batch, SharedPrefix
from kernels.shared_prefix import LEAST_BYTES, LEAST_PAGES, share
from kernels.triton.attend import attend
from tests.support.paged import LAYER, NEVER, Paged, build, i32, query, tolerance

Group = tuple[Sequence[int], int]
"""Sequences, and how many of their first pages are the same."""
POISONED_PAGE = 0
"""A page of NaN that `build` gives to nobody."""
FAMILY: list[Group] = [((3, 0, 2), 4)]
LENGTHS = (70, 40, 64, 83)
"""With FAMILY: one has a tail behind the shared pages, one nothing, one a page and a tail; and one is alone."""


def related(paged: Paged, groups: Sequence[Group]) -> Paged:
    """The same memory with the first pages of each group in common, as every backend reads it."""
    tables = paged.batch.tables.clone()
    for (first, *others), pages in groups:
        tables[others, :pages] = tables[first, :pages]
    return dataclasses.replace(paged, batch=dataclasses.replace(paged.batch, tables=tables))


def planned(paged: Paged, groups: Sequence[Group]) -> Batch:
    """The batch of `related`, told what is shared and left with poison wherever a page must not be read again. There
    is room for more groups, as in the fixed shapes of a captured step."""
    tables, first_pages = paged.batch.tables.clone(), i32([0] * len(paged.batch))
    for (first, *others), pages in groups:
        tables[others, :pages] = POISONED_PAGE
        first_pages[[first, *others]] = pages
    members = [b for who, _ in groups for b in who]
    ends = torch.tensor([len(who) for who, _ in groups]).cumsum(0).tolist()
    shared = SharedPrefix(
        members=i32([*members, *[NEVER] * (len(paged.batch) - len(members))]),
        member_starts=i32([0, *ends, ends[-1]]),
        page_counts=i32([*(pages for _, pages in groups), 0]),
        first_pages=first_pages,
        max_members=max(len(who) for who, _ in groups),
    )
    return dataclasses.replace(paged.batch, tables=tables, shared=shared)


def check(
    paged: Paged, groups: Sequence[Group], device: torch.device, group: int = 3, splits: int = 0, **options: float
) -> None:
    paged = related(paged, groups)
    moved, batch = paged.to(device), planned(paged, groups).to(device)
    q = query(moved, group)
    scale = paged.layout.head_dim**-0.5
    found = attend(
        q, moved.pages, moved.tails, moved.layout, LAYER, batch, scale=scale, scales=moved.scales, splits=splits,
        **options,
    )  # type: ignore[arg-type]  # fmt: skip
    worst = (found.cpu().double() - paged.exact(q, scale=scale, **options)).abs().max().item()
    assert worst <= tolerance(paged.layout.tail_format), worst


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "int8", "int8_channel", "int4", "k16v4", "int8_per_tensor"])
def test_formats(name: str, compute: str, device: torch.device) -> None:
    check(build(name, LENGTHS, kv_heads=1, compute=compute), FAMILY, device, splits=1)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "compute"), [(80, 32, "fp32"), (128, 16, "fp32"), (256, 16, "bf16")]
)
def test_shapes(head_dim: int, block_size: int, compute: str, device: torch.device) -> None:
    lengths = [length * block_size // 16 for length in LENGTHS]
    paged = build("int8_channel", lengths, head_dim=head_dim, block_size=block_size, kv_heads=1, compute=compute)
    check(paged, FAMILY, device)


def test_a_shape_without_a_tile_is_read_by_each_sequence(device: torch.device) -> None:
    paged = related(build("fp32", LENGTHS, head_dim=256, kv_heads=1), FAMILY)
    shared = planned(paged, FAMILY).shared
    moved, batch = paged.to(device), dataclasses.replace(paged.batch, shared=shared).to(device)
    q = query(moved, 3)
    found = attend(q, moved.pages, moved.tails, moved.layout, LAYER, batch, scale=0.0625)
    assert (found.cpu().double() - paged.exact(q, scale=0.0625)).abs().max() <= tolerance("fp32")


@pytest.mark.parametrize("group", [1, 3, 4, 16])
def test_members_that_fill_several_tiles(group: int, device: torch.device) -> None:
    lengths = [37 + b for b in range(9)]
    check(build("int8_channel", lengths, kv_heads=1), [(list(range(9))[::-1], 2)], device, group=group)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_families_and_some_who_are_alone(splits: int, device: torch.device) -> None:
    """Shares of both launches are empty here and there; the alone have pages, a tail, or no keys at all."""
    lengths = [150, 40, 0, 141, 3, 150, 99, 96]
    check(build("int8", lengths), [((3, 0, 5), 8), ((7, 6), 6)], device, splits=splits)


def test_soft_cap(device: torch.device) -> None:
    check(build("fp32", LENGTHS, kv_heads=1), FAMILY, device, splits=2, softcap=5.0)


def test_a_plan_made_from_tables(device: torch.device) -> None:
    long = 16 * (LEAST_PAGES + 2)
    paged = related(build("int8", [long, 20, long + 5], kv_heads=1), [((0, 2), LEAST_PAGES + 1)])
    shared = share(paged.batch.tables.numpy(), paged.batch.page_counts.numpy(), LEAST_BYTES)
    assert shared is not None and shared.first_pages.tolist() == [LEAST_PAGES + 1, 0, LEAST_PAGES + 1]
    moved, batch = paged.to(device), dataclasses.replace(paged.batch, shared=shared).to(device)
    q = query(moved, 2)
    found = attend(q, moved.pages, moved.tails, moved.layout, LAYER, batch, scale=0.125)
    assert (found.cpu().double() - paged.exact(q, scale=0.125)).abs().max() <= tolerance("fp32")


def test_what_cannot_be_shared_is_refused(device: torch.device) -> None:
    paged = related(build("int8", LENGTHS, kv_heads=1), FAMILY).to(device)
    batch = planned(paged.to(torch.device("cpu")), FAMILY).to(device)
    assert batch.shared is not None
    q = query(paged, 1)
    lse = torch.empty((4, 1, batch.max_pages), device=device)
    heads = {"kv_head_tables": batch.tables[:, None], "kv_head_counts": batch.page_counts[:, None]}
    two = dataclasses.replace(batch, query_starts=i32([0, 2, 3, 4, 5]).to(device), max_query=2)
    for wrong, queries, options in (
        (batch, q, {"window": 20}),
        (batch, q, {"page_lse": lse}),
        (dataclasses.replace(batch, **heads), q, {}),
        (two, torch.cat((q, q[:1])), {}),
    ):
        with pytest.raises(ValueError, match="shared pages are for decode"):
            attend(queries, paged.pages, paged.tails, paged.layout, LAYER, wrong, scale=1.0, **options)
    short = dataclasses.replace(batch.shared, first_pages=batch.shared.first_pages[:3])
    crowd = dataclasses.replace(batch.shared, max_members=5)
    for plan, text in ((short, "disagree"), (crowd, "up to 5 members")):
        with pytest.raises(ValueError, match=text):
            wrong = dataclasses.replace(batch, shared=plan)
            attend(q, paged.pages, paged.tails, paged.layout, LAYER, wrong, scale=1.0)
