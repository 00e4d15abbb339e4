"""What one attention call works on: which pages, which tail, which queries, for every sequence of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedPrefix:
    """Groups of sequences of a decode batch that start with the same pages, so that these can be read once a group.

    All tensors are int32, on the device of the pages. Group g are sequences
    `members[member_starts[g] : member_starts[g + 1]]`; the first `page_counts[g]` entries (at least one) of their
    tables are equal, and only those of the first member are read. A sequence is in one group or in none. There may be
    empty groups at the end, and what `members` holds behind the last group is not read: shapes can be those of the
    largest plan there is.
    """

    members: Tensor
    """[M]"""
    member_starts: Tensor
    """[G + 1], from 0"""
    page_counts: Tensor
    """[G]"""
    first_pages: Tensor
    """[B] pages at the start of each sequence's table that its group has: `page_counts` of the group, 0 without one"""
    max_members: int
    """Most sequences of one group."""

    def to(self, device: torch.device) -> SharedPrefix:
        return SharedPrefix(**_moved(self, device))


@dataclass(frozen=True)
class Batch:
    """Sequences of one `attend` call. All tensors are int32, on the device of the pages.

    Sequence b has `page_counts[b] * block_size + tail_lengths[b]` keys. Its queries are rows
    `query_starts[b] : query_starts[b + 1]` of q and stand at the **last** positions of the sequence; attention is
    causal. One query a sequence is decode. `tail_slots[b]` is not read where `tail_lengths[b]` is 0.

    The sparse path: with `kv_head_tables` and `kv_head_counts` each (sequence, KV head) reads its own subset of pages,
    in any order, and always the tail; only for decode and without a window.
    """

    tables: Tensor
    """[B, max_pages] page indices, in order of position; entries beyond the count are not read."""
    page_counts: Tensor
    """[B]"""
    tail_slots: Tensor
    """[B]"""
    tail_lengths: Tensor
    """[B]"""
    query_starts: Tensor
    """[B + 1], from 0 to T"""
    max_pages: int
    max_query: int
    """no sequence has more queries; 1 chooses the kernels of decode"""
    kv_head_tables: Tensor | None = None
    """[B, kv_heads, max_pages]"""
    kv_head_counts: Tensor | None = None
    """[B, kv_heads]"""
    shared: SharedPrefix | None = None
    """Says what `tables` say already, so that pages in common are read once. Only for decode of one query for every
    sequence. Results are the same without it up to rounding: the reference does not need it, and the CPU backend finds
    what is shared by itself, so both ignore it."""

    def to(self, device: torch.device) -> Batch:
        return Batch(**_moved(self, device))

    def __len__(self) -> int:
        return len(self.page_counts)


def _moved(parts: Batch | SharedPrefix, device: torch.device) -> dict[str, Any]:
    """Field values with all tensors on `device`."""
    values = {field.name: getattr(parts, field.name) for field in fields(parts)}
    return {k: v.to(device) if isinstance(v, Tensor | SharedPrefix) else v for k, v in values.items()}


def check(batch: Batch, q: Tensor, kv_heads: int, head_dim: int, window: int, page_lse: Tensor | None) -> None:
    """Raises ValueError for what no backend computes. Looks at shapes and types, never at values, and waits for
    nothing."""
    size = len(batch)
    if window < 0:
        raise ValueError(f"window must be the number of keys a query sees, or 0 for all, not {window}")
    vectors = (batch.page_counts, batch.tail_slots, batch.tail_lengths, batch.query_starts)
    for indices in (batch.tables, *vectors, batch.kv_head_tables, batch.kv_head_counts):
        if indices is not None and indices.dtype != torch.int32:
            raise ValueError(f"tables, counts, slots, lengths and starts must be int32, not {indices.dtype}")
    if not all(vector.is_contiguous() for vector in vectors):
        raise ValueError("counts, slots, lengths and starts must be contiguous")
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(f"q must be [T, n * {kv_heads}, {head_dim}], not {tuple(q.shape)}")
    if batch.query_starts.shape != (size + 1,) or batch.tables.shape[:1] != (size,):
        raise ValueError("tables, page_counts and query_starts disagree about the number of sequences")
    if batch.max_pages > batch.tables.shape[1]:
        raise ValueError(f"max_pages {batch.max_pages} is more than the table's {batch.tables.shape[1]} columns")
    sparse = batch.kv_head_tables is not None
    if sparse != (batch.kv_head_counts is not None):
        raise ValueError("kv_head_tables and kv_head_counts come together")
    if (sparse or page_lse is not None) and (batch.max_query != 1 or window):
        raise ValueError("page subsets and per-page log-sum-exp are for decode without a window")
    if page_lse is not None and page_lse.shape != (size, q.shape[1], batch.max_pages):
        raise ValueError(f"page_lse must be [{size}, {q.shape[1]}, {batch.max_pages}]")
    if batch.shared is not None:
        _check_shared(batch.shared, size)
        if q.shape[0] != size or batch.max_query != 1 or window or sparse or page_lse is not None:
            raise ValueError(
                "shared pages are for decode of one query a sequence, without a window, page subsets and per-page "
                "log-sum-exp"
            )


def _check_shared(shared: SharedPrefix, size: int) -> None:
    groups = len(shared.page_counts)
    if shared.member_starts.shape != (groups + 1,) or shared.first_pages.shape != (size,):
        raise ValueError("member_starts, page_counts and first_pages disagree about the number of groups or sequences")
    if groups == 0 or not 1 <= shared.max_members <= size:
        raise ValueError(f"{groups} groups of up to {shared.max_members} members among {size} sequences")
