"""Which sequences of a decode batch should read their first pages together.

Reading n pages once for m sequences saves (m - 1) n page reads. It costs a second launch and m partial results more to
merge. So a group should share several tiles of keys, and all groups together should save more than what a GPU reads
during a launch: at 3 to 5 TB/s and about 5 us for launch and drain, 16 to 25 MB; and more than that, because what many
sequences read at the same time comes from the GPU's cache in part. These are estimates, not measurements.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from kernels.attention import SharedPrefix

MEMBERS = 8
"""Most sequences of a group: with 4 query heads a KV head they fill a tile of 32 rows, and wider ones spill. A larger
family becomes several groups, each of which reads the pages."""
LEAST_PAGES = 16
"""Fewest pages a group has to share."""
LEAST_BYTES = 32 << 20
"""Fewest bytes of a layer that all groups together have to save."""

Group = tuple[list[int], int]
"""Sequences, and how many of their first pages are the same."""


def share(tables: np.ndarray, page_counts: np.ndarray, layer_bytes: int) -> SharedPrefix | None:
    """The groups for sequences with `page_counts` [B] pages in `tables` int32 [B, >= max pages], or None if reading
    pages of `layer_bytes` a layer once is not worth its while. In memory of the host, and in shapes that depend on B
    alone.
    """
    size = len(page_counts)
    if int(page_counts.sum()) * layer_bytes < LEAST_BYTES:
        return None
    order, common = _sorted_by_prefix(tables, page_counts.tolist())
    groups = _groups(order, common)
    if sum((len(who) - 1) * pages for who, pages in groups) * layer_bytes < LEAST_BYTES:
        return None
    return _plan(groups, size)


def _sorted_by_prefix(tables: np.ndarray, counts: list[int]) -> tuple[list[int], list[int]]:
    """Sequences in an order in which those with a common prefix stand side by side, and the number of pages that each
    has in common with the next."""
    order = sorted(range(len(counts)), key=lambda b: tables[b, : counts[b]].tobytes())
    common = []
    for a, b in pairwise(order):
        shorter = min(counts[a], counts[b])
        different = np.flatnonzero(tables[a, :shorter] != tables[b, :shorter])
        common.append(int(different[0]) if len(different) else shorter)
    return order, common


def _groups(order: list[int], common: list[int]) -> list[Group]:
    """The best groups of neighbours, then the best of those that are neighbours without them, until none is left to
    find: a prompt that all share can be that of many while a few go on together."""
    groups: list[Group] = []
    while runs := _best_runs(common):
        kept: list[int] = []
        next_common: list[int] = []
        taken = 0
        for start, end, pages in [*runs, (len(order), len(order), 0)]:
            if pages:
                groups.append((order[start:end], pages))
            for at in range(taken, start):
                if kept:
                    next_common.append(min(common[kept[-1] : at]))
                kept.append(at)
            taken = end
        order, common = [order[at] for at in kept], next_common
    return groups


def _best_runs(common: list[int]) -> list[tuple[int, int, int]]:
    """The runs [start, end) of neighbours, and the pages each shares, that save the most page reads, in order: dynamic
    programming over where the last run of the first n sequences begins."""
    saved, last = [0, 0], [(0, 0), (0, 0)]  # of the first n sequences: the most to save; its last run's start, pages
    for end in range(2, len(common) + 2):
        best, run, pages = saved[end - 1], (end - 1, 0), common[end - 2]
        for start in range(end - 2, max(end - MEMBERS, 0) - 1, -1):
            pages = min(pages, common[start])
            if pages < LEAST_PAGES:
                break
            gain = saved[start] + (end - start - 1) * pages
            if gain > best:
                best, run = gain, (start, pages)
        saved.append(best)
        last.append(run)
    runs, end = [], len(common) + 1
    while end > 1:
        start, pages = last[end]
        if pages:
            runs.append((start, end, pages))
        end = start
    return runs[::-1]


def _plan(groups: list[Group], size: int) -> SharedPrefix:
    members, first_pages = np.zeros(size, np.int32), np.zeros(size, np.int32)
    starts, counts = np.zeros(size // 2 + 1, np.int32), np.zeros(size // 2, np.int32)
    filled = 0
    for g, (who, pages) in enumerate(groups):
        members[filled : filled + len(who)] = who
        first_pages[who] = pages
        filled += len(who)
        starts[g + 1 :] = filled
        counts[g] = pages
    return SharedPrefix(
        members=torch.from_numpy(members),
        member_starts=torch.from_numpy(starts),
        page_counts=torch.from_numpy(counts),
        first_pages=torch.from_numpy(first_pages),
        max_members=min(MEMBERS, size),
    )
