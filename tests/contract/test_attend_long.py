"""Attention over long contexts and large pools, against the float64 reference."""

from __future__ import annotations

import mmap

import pytest
import torch

from kernels.attention import Batch
from kernels.dispatch import select
from kernels.layout import page_layout
from tests.support import kv_cases
from tests.support.kv_cases import attend, i32, oracle, query

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_integer_products_keep_what_a_flat_distribution_sums_up_to() -> None:
    """One token with half of all weight, the rest spread so thin that a weight of eight bits would lose it."""
    case = kv_cases.build(page_layout("int8", "int8", 16, 1, 1, 64), [4096])
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    q[0, 0] = case.k[0][100, 0] * 0.55
    seen, want = attend(select("cpu"), q, case, case.batch), oracle(q, case, case.batch)
    assert ((seen.double() - want).abs() <= 2**-8 * want.abs() + 1e-3).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", ["fp32", "int8_channel", "int4"])
def test_the_error_does_not_grow_with_the_context(name: str, queries: int) -> None:
    """Root mean square over a few queries; the largest single error is chance."""
    layout = page_layout(name, name, 16, 1, 1, 64, tail_format="fp32")
    errors = []
    for length in (1024, 32768):
        case = kv_cases.build(layout, [length], ops=select("cpu"))
        batch, squares = case.alone(0, queries), []
        for q in query(8 * queries, 3, 64).split(queries):
            squares.append((attend(select("cpu"), q, case, batch).double() - oracle(q, case, batch)).square().mean())
        errors.append(float(torch.stack(squares).mean().sqrt()))
    assert errors[1] <= max(errors[0], 2e-7)


@pytest.mark.parametrize("queries", [1, 3])
def test_offsets_beyond_four_gigabytes(queries: int) -> None:
    layout = page_layout("int8", "int8", 16, 8, 8, 128)
    count = 5 * 2**30 // layout.page_bytes
    area = mmap.mmap(-1, count * layout.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = torch.frombuffer(area, dtype=torch.uint8).view(count, layout.page_bytes)
    small = kv_cases.build(layout, [48], layer=7)
    ids = i32(count - 1, 0, count - 7)
    for row, old in zip(ids.tolist(), small.batch.tables[0, :3].tolist(), strict=True):
        pages[row] = small.pages[old]
    near = small.alone(0, queries)
    far = Batch(ids.view(1, 3), near.page_counts, near.tail_slots, near.tail_lengths, near.query_starts, 3, queries)
    q = query(queries, 8, 128)
    moved = kv_cases.Case(layout, pages, small.tails, far, small.scales, [], [])
    assert torch.equal(attend(select("cpu"), q, moved, far, 7), attend(select("cpu"), q, small, near, 7))
    place = layout.layer(7)
    own = slice(place.offset, place.offset + layout.layer_bytes)
    pages[ids.long()] = 0
    select("cpu").seal(pages, layout, 7, small.k[0], small.v[0], ids)
    assert torch.equal(pages[ids.long(), own], small.pages[small.batch.tables[0, :3].long(), own])
