"""Attention, format x backend x shape, against the float64 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from kernels import formats
from kernels.attention import Batch
from kernels.cpu import build
from kernels.dispatch import select
from kernels.layout import page_layout
from tests.support import kv_cases
from tests.support.kv_cases import attend, i32, oracle, query

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NAMES = formats.names()
PAIRS = [(n, n) for n in NAMES] + [("bf16", "int4"), ("int8_channel", "int4"), ("fp8_e4m3", "int8")]
SHAPES = [(16, 3, 3, 64), (32, 2, 4, 80), (16, 1, 7, 96), (32, 2, 1, 128), (16, 1, 16, 256)]
"""block_size, kv_heads, group, head_dim"""
LENGTHS = [1, 15, 16, 17, 32, 33, 321]
WIDE = ["bf16", "fp16", "fp32"]
SEVERAL_PARTS = [1, 511, 512, 513, 544, 1041]
"""Wide formats are cut every 512 tokens if both sides are wide, all others every 256."""
EXACT = 1e-5
"""fp32 arithmetic on the decoded values, absolute, for values up to 8 and logits up to 10."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_decode_equals_the_reference(
    pair: tuple[str, str], shape: tuple[int, int, int, int], lengths: Sequence[int] = LENGTHS
) -> None:
    size, kv_heads, group, dim = shape
    case = kv_cases.build(page_layout(*pair, size, 2, kv_heads, dim), lengths, layer=1)
    q = query(len(lengths), kv_heads * group, dim)
    want_lse = torch.empty(len(lengths), kv_heads * group, case.batch.max_pages)
    seen_lse = torch.empty_like(want_lse)
    want = oracle(q, case, case.batch, 1, page_lse=want_lse)
    seen = attend(select("cpu"), q, case, case.batch, 1, page_lse=seen_lse)
    assert torch.allclose(seen.double(), want, atol=EXACT, rtol=0)
    assert torch.allclose(seen_lse, want_lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", [(16, 3, 3, 64), (32, 1, 4, 128)], ids=str)
@pytest.mark.parametrize("pair", [*product(WIDE, WIDE), ("bf16", "int8"), ("int4", "fp32")], ids="-".join)
def test_sequences_of_several_parts(pair: tuple[str, str], shape: tuple[int, int, int, int]) -> None:
    test_decode_equals_the_reference(pair, shape, SEVERAL_PARTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_in_fp32_equals_itself_in_float64(name: str) -> None:
    case = kv_cases.build(page_layout(name, name, 16, 1, 2, 64), [1, 16, 33])
    q = query(3, 4, 64)
    seen = attend(select("reference"), q, case, case.batch)
    assert torch.allclose(seen.double(), oracle(q, case, case.batch), atol=EXACT, rtol=0)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_instruction_set_computes_the_same(pair: tuple[str, str]) -> None:
    test_decode_equals_the_reference(pair, (16, 1, 3, 80))
    test_chunks_equal_the_reference("fp32", pair, (16, 1, 3, 80), {})


@pytest.mark.parametrize("tail", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_of_every_dtype(tail: str, dtype: torch.dtype) -> None:
    case = kv_cases.build(page_layout("int8_channel", "int8", 16, 1, 2, 64, tail_format=tail), [5, 100])
    q = query(2, 6, 64, dtype)
    seen = attend(select("cpu"), q, case, case.batch)
    assert seen.dtype == dtype
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0.0}[dtype]
    want = oracle(q, case, case.batch)
    assert ((seen.double() - want).abs() <= EXACT + rounding * want.abs()).all()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(16, 64), (32, 80), (16, 96), (32, 256)], ids=str)
@pytest.mark.parametrize("pair", [("int8", "int8"), ("int8_channel", "int8_per_tensor"), ("int8_per_tensor", "int4"),
                                  ("int4", "int4")], ids="-".join)  # fmt: skip
def test_integer_products_for_bf16_queries(pair: tuple[str, str], shape: tuple[int, int], group: int) -> None:
    size, dim = shape
    case = kv_cases.build(page_layout(*pair, size, 1, 2, dim), LENGTHS)
    q = query(len(LENGTHS), 2 * group, dim, torch.bfloat16)
    q[0, 0], q[1, 0, 1:] = 0, 0
    q[2] *= 1e-35
    pages = torch.empty(len(LENGTHS), 2 * group, case.batch.max_pages)
    seen = attend(select("cpu"), q, case, case.batch, page_lse=pages)
    want_pages = torch.empty_like(pages)
    want = oracle(q, case, case.batch, page_lse=want_pages)
    assert ((seen.double() - want).abs() <= 2**-8 * want.abs() + 1e-3).all()
    assert torch.allclose(pages, want_pages, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "options", [{"window": w} for w in (1, 5, 16, 17, 100, 700)] + [{"softcap": c} for c in (2.0, -2.0)], ids=str
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_windows_and_soft_caps(backend: str, options: dict[str, Any]) -> None:
    case = kv_cases.build(page_layout("int8", "bf16", 16, 1, 3, 64), LENGTHS)
    q = query(len(LENGTHS), 9, 64)
    seen = attend(select(backend), q, case, case.batch, **options)
    assert torch.allclose(seen.double(), oracle(q, case, case.batch, **options), atol=EXACT, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "int8_channel", "int4"])
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(name: str, threads: int) -> None:
    case = kv_cases.build(page_layout(name, name, 16, 1, 3, 64), [700, 16, 33, 5, 4113, 300, 256, 1])
    q = query(8, 9, 64, torch.bfloat16)
    build.set_threads(threads)
    try:
        together = attend(select("cpu"), q, case, case.batch)
        for b in range(8):
            assert torch.equal(attend(select("cpu"), q[b : b + 1], case, case.alone(b))[0], together[b])
    finally:
        build.set_threads(2)


@pytest.mark.parametrize("pair", [("int8_channel", "int4"), ("bf16", "bf16"), ("fp32", "fp16")], ids="-".join)
def test_page_subsets_per_head_are_the_dense_kernel_with_another_table(pair: tuple[str, str]) -> None:
    case = kv_cases.build(page_layout(*pair, 16, 1, 3, 64), [700, 90])
    dense, chosen = case.batch, [[[0, 7, 30], list(range(3, 40)), []], [[4, 1], [0, 1, 2, 3, 4], [2]]]
    tables = torch.full((2, 3, dense.max_pages), 10**6, dtype=torch.int32)
    for b, heads in enumerate(chosen):
        for h, picks in enumerate(heads):
            tables[b, h, : len(picks)] = dense.tables[b, picks]
    counts = torch.tensor([[len(picks) for picks in heads] for heads in chosen], dtype=torch.int32)
    sparse = Batch(
        dense.tables, dense.page_counts, dense.tail_slots, dense.tail_lengths, dense.query_starts, dense.max_pages, 1,
        kv_head_tables=tables, kv_head_counts=counts,
    )  # fmt: skip
    q = query(2, 9, 64)
    seen = attend(select("cpu"), q, case, sparse)
    assert torch.allclose(seen.double(), oracle(q, case, sparse), atol=EXACT, rtol=0)
    full = tables.clone()
    full[:, :] = dense.tables.unsqueeze(1)
    everything = dense.page_counts.unsqueeze(1).expand(2, 3).contiguous()
    same = Batch(
        dense.tables, dense.page_counts, dense.tail_slots, dense.tail_lengths, dense.query_starts, dense.max_pages, 1,
        kv_head_tables=full, kv_head_counts=everything,
    )  # fmt: skip
    assert torch.equal(attend(select("cpu"), q, case, same), attend(select("cpu"), q, case, dense))
    with pytest.raises(ValueError, match="window"):
        attend(select("cpu"), q, case, sparse, window=8)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("int8_channel", "int8"), ("int4", "int4")], ids="-".join)
@pytest.mark.parametrize("tail", ["bf16", "fp32"])
def test_chunks_equal_the_reference(
    tail: str, pair: tuple[str, str], shape: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    size, kv_heads, group, dim = shape
    case = kv_cases.build(page_layout(*pair, size, 1, kv_heads, dim, tail_format=tail), [4 * size + 5, 7, 300])
    dtype = torch.bfloat16 if tail == "bf16" else torch.float32
    for b, length in enumerate([4 * size + 5, 7, 300]):
        for queries in {2, min(length, 66), length}:
            q, batch = query(queries, kv_heads * group, dim, dtype), case.alone(b, queries)
            want = oracle(q, case, batch, **options)
            error = (attend(select("cpu"), q, case, batch, **options).double() - want).abs().max()
            # bf16 rounds K, V and p to eight bits before the products, as torch's flash kernel does
            assert error <= (0.05 if tail == "bf16" else EXACT)


@pytest.mark.parametrize("tail", ["bf16", "fp32"])
def test_bits_do_not_depend_on_how_a_prompt_was_cut(tail: str) -> None:
    layout = page_layout("int8_channel", "int8", 16, 1, 3, 64, tail_format=tail)
    case, length = kv_cases.build(layout, [640]), 640
    q = query(length, 9, 64, torch.bfloat16 if tail == "bf16" else torch.float32)
    whole = attend(select("cpu"), q, case, case.alone(0, length))
    for cut in (16, 48, 320, 624):
        first, rest = case.alone(0, cut), case.alone(0, length - cut)
        start = Batch(first.tables, i32(cut // 16), i32(0), i32(0), first.query_starts, first.max_pages, cut)
        parts = [attend(select("cpu"), q[:cut], case, start), attend(select("cpu"), q[cut:], case, rest)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("length", [88, 96, 127, 128, 129, 255, 256])
def test_decode_and_prompt_kernels_agree(length: int) -> None:
    case = kv_cases.build(page_layout("int8", "int8", 16, 1, 3, 64, tail_format="fp32"), [length])
    q = query(2, 9, 64)
    both = attend(select("cpu"), q, case, case.alone(0, 2))
    assert torch.allclose(both[1:], attend(select("cpu"), q[1:], case, case.alone(0)), atol=EXACT, rtol=0)


def test_a_mixed_batch_of_chunks_and_single_queries() -> None:
    case = kv_cases.build(page_layout("bf16", "bf16", 16, 1, 3, 64), [40, 100, 17])
    one = case.batch
    mixed = Batch(one.tables, one.page_counts, one.tail_slots, one.tail_lengths, i32(0, 1, 31, 31), one.max_pages, 30)
    q = query(31, 9, 64)
    assert torch.allclose(attend(select("cpu"), q, case, mixed).double(), oracle(q, case, mixed), atol=EXACT, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_wrong_shapes_are_refused_before_anything_is_read(backend: str) -> None:
    case = kv_cases.build(page_layout("bf16", "bf16", 16, 1, 3, 64), [20])
    with pytest.raises(ValueError, match="q must be"):
        attend(select(backend), query(1, 8, 64), case, case.batch)
    with pytest.raises(ValueError, match="page_lse"):
        attend(select(backend), query(1, 9, 64), case, case.batch, page_lse=torch.empty(1, 9, 1))
    with pytest.raises(ValueError, match="window"):
        attend(select(backend), query(1, 9, 64), case, case.batch, window=-1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["tables", "page_counts", "tail_slots", "tail_lengths", "query_starts"])
def test_indices_of_another_type_or_stride_are_refused(name: str, backend: str) -> None:
    case = kv_cases.build(page_layout("bf16", "bf16", 16, 1, 3, 64), [20, 35])
    given = getattr(case.batch, name)
    with pytest.raises(ValueError, match="int32"):
        attend(select(backend), query(2, 9, 64), case, dataclasses.replace(case.batch, **{name: given.long()}))
    apart = torch.stack((given, given), dim=-1)[..., 0]
    if backend == "cpu" or name != "tables":  # the reference takes a table of any stride
        with pytest.raises(ValueError, match="contiguous"):
            attend(select(backend), query(2, 9, 64), case, dataclasses.replace(case.batch, **{name: apart}))


@pytest.mark.parametrize("queries", [1, 3])
def test_tables_that_are_not_rows_in_memory_are_refused(queries: int) -> None:
    case = kv_cases.build(page_layout("bf16", "bf16", 16, 1, 3, 64), [40, 40])
    batch = case.alone(0, queries)
    spread = dataclasses.replace(batch, tables=batch.tables.repeat_interleave(2, dim=1)[:, ::2])
    with pytest.raises(ValueError, match="contiguous rows"):
        attend(select("cpu"), query(queries, 9, 64), case, spread)


def test_merge_of_parts_equals_the_whole() -> None:
    logits, v = torch.randn(3, 2, 100, dtype=torch.float64), torch.randn(100, 64, dtype=torch.float64)
    parts = [slice(0, 10), slice(10, 10), slice(10, 100)]
    outs = torch.stack(
        [logits[..., s].softmax(-1) @ v[s] if s.stop > s.start else torch.full((3, 2, 64), torch.nan) for s in parts]
    )
    lses = torch.stack([logits[..., s].logsumexp(-1) for s in parts])
    for backend in ("reference", "cpu"):
        out, lse = select(backend).merge(outs, lses)
        assert torch.allclose(out, logits.softmax(-1) @ v) and torch.allclose(lse, logits.logsumexp(-1))
        nothing, empty = select(backend).merge(outs[1:2], lses[1:2])
        assert (nothing == 0).all() and torch.isneginf(empty).all()
