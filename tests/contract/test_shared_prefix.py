"""Decode over shared pages: read once for several sequences, with the bits of each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.cpu import build
from kernels.dispatch import select
from kernels.layout import page_layout
from tests.support import kv_cases
from tests.support.kv_cases import attend, i32, oracle, query

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PART, PART_WIDE = 256, 512
"""Tokens of the kernel's unit of sharing; the second where keys and values have 16 bits or more."""


Prefix = tuple[int, int]
"""Whose first pages a sequence has, and how many tokens of them; the rest are its own."""


def shared(
    pair: tuple[str, str], size: int, heads: tuple[int, int], lengths: list[int], prefixes: list[Prefix]
) -> kv_cases.Case:
    """Sequences with prefixes in common."""
    case = kv_cases.build(page_layout(*pair, size, 1, *heads), lengths)
    tables = case.batch.tables.clone()
    for b, (owner, tokens) in enumerate(prefixes):
        tables[b, : tokens // size] = tables[owner, : tokens // size]
    return replace(case, batch=replace(case.batch, tables=tables))


def assert_as_alone(case: kv_cases.Case, q: torch.Tensor, **options: Any) -> torch.Tensor:
    together = attend(select("cpu"), q, case, case.batch, **options)
    for b in range(len(q)):
        alone = attend(select("cpu"), q[b : b + 1], case, case.alone(b), **options)
        assert torch.equal(alone[0], together[b])
    return together


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("sequences", [2, 3, 8, 17])
def test_sharers_of_any_number(sequences: int, group: int, dtype: torch.dtype) -> None:
    """Lengths differ; what is shared ends inside a part, at its edge, or is everything."""
    lengths = [2 * PART + 37 + 16 * (b % 3) for b in range(sequences)]
    prefixes = [(0, (PART, PART + 48, 2 * PART)[b % 3]) for b in range(sequences)]
    case = shared(("int8_channel", "int8"), 16, (2, 64), lengths, prefixes)
    q = query(sequences, 2 * group, 64, dtype)
    seen = assert_as_alone(case, q)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    assert torch.allclose(seen.double(), oracle(q, case, case.batch), atol=tolerance, rtol=0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["bf16", "int8", "int8_channel", "int4", "fp8_e4m3"])
def test_trees_of_prefixes(name: str, threads: int) -> None:
    """0, 1, 2 agree on three parts, 3 on two of them, 4 on a page; 5 and 6 are another family; 7 has only a tail."""
    part = PART_WIDE if name == "bf16" else PART
    lengths = [4 * part + 5, 3 * part, 3 * part + 9, 3 * part + 100, 700, 2 * part + 1, 2 * part + 17, 3]
    prefixes = [(0, 0), (0, 3 * part), (0, 3 * part), (0, 2 * part), (0, 16), (5, 0), (5, 2 * part), (7, 0)]
    case = shared((name, name), 16, (3, 64), lengths, prefixes)
    build.set_threads(threads)
    try:
        assert_as_alone(case, query(8, 9, 64, torch.bfloat16))
    finally:
        build.set_threads(2)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"window": 20}, {"softcap": 3.0}], ids=str)
def test_one_prompt_continued_several_ways(options: dict[str, Any], size: int) -> None:
    """Equal lengths and all pages in common, as in parallel sampling: only the tails differ."""
    case = shared(("int8", "int4"), size, (2, 80), [2 * PART + size + 7] * 4, [(0, 2 * PART + size)] * 4)
    q = query(4, 8, 80, torch.float32)
    seen = assert_as_alone(case, q, **options)
    assert torch.allclose(seen.double(), oracle(q, case, case.batch, **options), atol=1e-5, rtol=0)


def test_windows_that_start_at_different_pages() -> None:
    lengths = [1500, 1517, 1540, 1600]
    case = shared(("bf16", "bf16"), 16, (1, 64), lengths, [(0, 1488)] * 4)
    q = query(4, 3, 64, torch.float32)
    seen = assert_as_alone(case, q, window=900)
    assert torch.allclose(seen.double(), oracle(q, case, case.batch, window=900), atol=1e-5, rtol=0)


def test_page_log_sum_exp_goes_to_every_sharer() -> None:
    case = shared(("int8_channel", "int8"), 16, (2, 64), [600, 530, 900], [(0, 512)] * 3)
    q = query(3, 6, 64, torch.float32)
    seen, want = (torch.empty(3, 6, case.batch.max_pages) for _ in range(2))
    attend(select("cpu"), q, case, case.batch, page_lse=seen)
    oracle(q, case, case.batch, page_lse=want)
    assert torch.allclose(seen, want, atol=2e-5, rtol=0)


def test_sequences_without_a_query_and_page_subsets_share_nothing_by_mistake() -> None:
    case = shared(("int8", "int8"), 16, (2, 64), [600, 530, 900], [(0, 512)] * 3)
    idle = replace(case.batch, query_starts=i32(0, 1, 1, 2))
    q = query(2, 6, 64, torch.bfloat16)
    seen = attend(select("cpu"), q, case, idle)
    for row, b in enumerate((0, 2)):
        assert torch.equal(attend(select("cpu"), q[row : row + 1], case, case.alone(b))[0], seen[row])

    tables = case.batch.tables.unsqueeze(1).repeat(1, 2, 1)
    tables[:, 1, :16] = tables[:, 1, :16].flip(-1)
    counts = torch.tensor([[20, 3], [20, 16], [0, 17]], dtype=torch.int32)
    sparse = replace(case.batch, kv_head_tables=tables, kv_head_counts=counts)
    q = query(3, 6, 64, torch.float32)
    seen = attend(select("cpu"), q, case, sparse)
    assert torch.allclose(seen.double(), oracle(q, case, sparse), atol=1e-5, rtol=0)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["bf16", "int8", "int8_channel", "int4", "fp8_e5m2"])
def test_what_is_not_a_number_stays_so(name: str, dtype: torch.dtype, queries: int) -> None:
    """An engine tells a broken model by it: never a plausible output from a NaN or infinite activation."""
    case = kv_cases.build(page_layout(name, name, 16, 1, 2, 64), [288, 300])
    for bad in (torch.nan, torch.inf):
        for channel in (0, 63):
            q = query(2 * queries, 4, 64, dtype)
            q[0, 1, channel] = bad
            q[queries, 2, :] = bad
            batch = replace(case.batch, query_starts=i32(0, queries, 2 * queries), max_query=queries)
            seen, want = attend(select("cpu"), q, case, batch), oracle(q, case, batch)
            assert want[0, 1].isnan().all() and want[queries, 2].isnan().all()
            assert torch.equal(seen.isnan(), want.isnan())


@pytest.mark.parametrize("name", ["bf16", "int8", "int8_channel"])
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_broken_page_or_tail_reaches_the_output(side: str, name: str) -> None:
    case = kv_cases.build(page_layout(name, name, 16, 1, 2, 64), [300, 300, 300])
    place = case.layout.layer(0)
    codes = place.k_codes if side == "k" else place.v_codes
    scales = place.k_scales if side == "k" else place.v_scales
    start = codes if name == "bf16" else scales
    case.pages[int(case.batch.tables[0, 7]), start : start + 2] = 0xFF
    tail = place.tail_k if side == "k" else place.tail_v
    case.tails[1, tail : tail + 2] = 0xFF
    q = query(3, 4, 64, torch.bfloat16)
    seen, want = attend(select("cpu"), q, case, case.batch), oracle(q, case, case.batch)
    assert want[0].isnan().any() and want[1].isnan().any() and not want[2].isnan().any()
    assert torch.equal(seen.isnan(), want.isnan())
