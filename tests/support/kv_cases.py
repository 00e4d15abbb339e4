"""Pools filled with random sequences, for tests of kernels. Everything a sequence does not own is poisoned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import Batch
from kernels.dispatch import Ops, select
from kernels.layout import PageLayout
from kernels.reference._pages import tail_dtype

POISON = 0xFF
"""NaN in bf16, fp16, fp32 and e4m3."""


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens in a pool, written by `ops`; k and v are the activations that went in."""

    layout: PageLayout
    pages: Tensor
    tails: Tensor
    batch: Batch
    scales: Tensor
    k: list[Tensor]
    v: list[Tensor]

    def alone(self, b: int, queries: int = 1) -> Batch:
        """Sequence b by itself with its last `queries` positions as queries."""
        one = self.batch
        row = slice(b, b + 1)
        starts = torch.tensor([0, queries], dtype=torch.int32)
        return Batch(
            one.tables[row],
            one.page_counts[row],
            one.tail_slots[row],
            one.tail_lengths[row],
            starts,
            one.max_pages,
            queries,
        )


def i32(*values: int) -> Tensor:
    """A vector of indices."""
    return torch.tensor(values, dtype=torch.int32)


def per_tensor_scales(layers: int) -> Tensor:
    """Different for every layer and side, wide enough for the activations below."""
    return 0.06 + 0.01 * torch.arange(2 * layers, dtype=torch.float32).view(layers, 2)


def activations(tokens: int, kv_heads: int, head_dim: int, seed: int) -> Tensor:
    """Normal with a biased channel, as keys have."""
    x = torch.randn(tokens, kv_heads, head_dim, generator=torch.Generator().manual_seed(seed))
    x[..., 3] += 4
    return x


def build(layout: PageLayout, lengths: list[int], layer: int = 0, seed: int = 0, ops: Ops | None = None) -> Case:
    """Fills one layer. Page indices are scattered; unused pages, table entries and tail slots are poison."""
    ops = ops or select("reference")
    size = layout.block_size
    whole = [length // size for length in lengths]
    width, total = max(whole) + 1, sum(whole) + 3
    pages = torch.full((total, layout.page_bytes), POISON, dtype=torch.uint8)
    tails = torch.full((len(lengths) + 1, layout.tail_bytes), POISON, dtype=torch.uint8)
    tables = torch.full((len(lengths), width), total - 1, dtype=torch.int32)
    free = torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed)).int()
    scales, ks, vs = per_tensor_scales(layout.layers), [], []
    for b, length in enumerate(lengths):
        k = activations(length, layout.kv_heads, layout.head_dim, seed + 2 * b + 1).to(tail_dtype(layout))
        v = activations(length, layout.kv_heads, layout.head_dim, seed + 2 * b + 2).to(tail_dtype(layout))
        mine, free = free[: whole[b]], free[whole[b] :]
        tables[b, : whole[b]] = mine
        sealed = whole[b] * size
        if sealed:
            ops.seal(pages, layout, layer, k[:sealed], v[:sealed], mine, scales)
        if length > sealed:
            slots = torch.full((length - sealed,), b, dtype=torch.int32)
            places = torch.arange(length - sealed, dtype=torch.int32)
            ops.append_tails(tails, layout, layer, k[sealed:], v[sealed:], slots, places)
        ks.append(k)
        vs.append(v)
    batch = Batch(
        tables=tables,
        page_counts=i32(*whole),
        tail_slots=torch.arange(len(lengths), dtype=torch.int32),
        tail_lengths=i32(*(length % size for length in lengths)),
        query_starts=torch.arange(len(lengths) + 1, dtype=torch.int32),
        max_pages=width,
        max_query=1,
    )
    return Case(layout, pages, tails, batch, scales, ks, vs)


def oracle(q: Tensor, case: Case, batch: Batch, layer: int = 0, **options: Any) -> Tensor:
    """The reference in float64."""
    scale = case.layout.head_dim**-0.5
    run = select("reference").attend
    found = run(
        q.double(), case.pages, case.tails, case.layout, layer, batch,
        scale=scale, scales=case.scales, compute=torch.float64, **options,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def attend(ops: Ops, q: Tensor, case: Case, batch: Batch, layer: int = 0, **options: Any) -> Tensor:
    """One call of a backend with the scale everybody uses."""
    scale = case.layout.head_dim**-0.5
    found = ops.attend(q, case.pages, case.tails, case.layout, layer, batch, scale=scale, scales=case.scales, **options)
    assert isinstance(found, Tensor)
    return found


def query(batch: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Queries [batch, heads, dim], the same each time."""
    return torch.randn(batch, heads, dim, generator=torch.Generator().manual_seed(9)).to(dtype)
