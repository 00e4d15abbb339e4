"""Decode over bf16 pages with bf16 queries, where a CPU may multiply both as they are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu import build
from kernels.dispatch import select
from kernels.layout import page_layout
from tests.support import kv_cases
from tests.support.kv_cases import attend, oracle

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LENGTHS = [1, 16, 17, 47, 48, 321, 288, 700]
"""Nothing sealed, odd and even numbers of pages, parts that end inside a page and with one."""
SHAPES = [(16, 64), (32, 64), (16, 80), (32, 80), (16, 96), (32, 96), (16, 256)]
"""block_size, head_dim"""


def made(size: int, dim: int, v_format: str = "bf16", lengths: list[int] = LENGTHS) -> kv_cases.Case:
    return kv_cases.build(page_layout("bf16", v_format, size, 1, 2, dim), lengths)


def query(case: kv_cases.Case, group: int) -> torch.Tensor:
    shape = len(case.batch), 2 * group, case.layout.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def assert_right(seen: torch.Tensor, want: torch.Tensor) -> None:
    """The output is rounded to bf16; sums before that are fp32."""
    assert ((seen.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, int], group: int) -> None:
    """Slots that nobody owns are NaN."""
    case = made(*shape)
    q = query(case, group)
    lse, want_lse = (torch.empty(len(LENGTHS), 2 * group, case.batch.max_pages) for _ in range(2))
    seen = attend(select("cpu"), q, case, case.batch, page_lse=lse)
    assert_right(seen, oracle(q, case, case.batch, page_lse=want_lse))
    assert torch.allclose(lse, want_lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("v_format", ["int8", "int4", "fp32"])
def test_values_of_another_format(v_format: str) -> None:
    case = made(16, 64, v_format)
    q = query(case, 3)
    want = oracle(q, case, case.batch)
    seen = attend(select("cpu"), q, case, case.batch)
    assert ((seen.double() - want).abs() <= 2**-8 * want.abs() + 1e-3).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_bits_it_has_alone(shape: tuple[int, int], group: int, threads: int) -> None:
    """Half of the sequences share pages, so that tiles hold rows of several."""
    case = made(*shape, lengths=[700, 17, 690, 33, 700, 300, 689, 5])
    tables, shared = case.batch.tables.clone(), 672 // shape[0]
    tables[[2, 4, 6], :shared] = tables[0, :shared]
    case = replace(case, batch=replace(case.batch, tables=tables))
    q = query(case, group)
    build.set_threads(threads)
    try:
        together = attend(select("cpu"), q, case, case.batch)
        for b in range(len(case.batch)):
            assert torch.equal(attend(select("cpu"), q[b : b + 1], case, case.alone(b))[0], together[b])
    finally:
        build.set_threads(2)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(("q_scale", "k_scale"), [(1.0, 1e-39), (1e-39, 1.0), (1e-20, 1e-20), (1e-30, 1e30),
                                                  (1e17, 1e17), (1e-3, 1e36)])  # fmt: skip
def test_subnormal_and_huge_numbers(q_scale: float, k_scale: float, size: int) -> None:
    """Scores that vanish give all tokens one weight; scores in the 1e34s leave one token, and no infinity."""
    case = made(size, 64, lengths=[47, 96, 321])
    layout, ops = case.layout, select("reference")
    q = (query(case, 3).float() * q_scale).bfloat16()
    for b, k in enumerate(case.k):
        sealed, slots = len(k) // size * size, torch.full((len(k) % size,), b, dtype=torch.int32)
        scaled, v = (k.float() * k_scale).bfloat16(), case.v[b]
        ops.seal(case.pages, layout, 0, scaled[:sealed], v[:sealed], case.batch.tables[b, : sealed // size])
        places = torch.arange(len(slots), dtype=torch.int32)
        ops.append_tails(case.tails, layout, 0, scaled[sealed:], v[sealed:], slots, places)
    want = oracle(q, case, case.batch)
    assert want.isfinite().all() and want.abs().max() > 0.01
    assert_right(attend(select("cpu"), q, case, case.batch), want)
