"""Which sequences read together: every page of every sequence exactly once, and few of them for one sequence only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import shared_prefix
from kernels.attention import SharedPrefix
from kernels.shared_prefix import LEAST_BYTES, LEAST_PAGES, MEMBERS, share

Tables = list[list[int]]


@st.composite
def forests(draw: st.DrawFn, most: int = 14) -> Tables:
    """Tables of sequences that go on from where another one was, so that all pages before are common."""
    tables: Tables = []
    fresh = iter(range(10_000))
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.sampled_from([[], *tables]))
        kept = parent[: draw(st.integers(0, len(parent)))]
        tables.append(kept + [next(fresh) for _ in range(draw(st.integers(0, 6)))])
    return tables


def plan(tables: Tables, layer_bytes: int = LEAST_BYTES) -> SharedPrefix | None:
    width = max(map(len, tables), default=0) + 1
    packed = np.full((len(tables), width), -1, np.int32)
    for row, table in zip(packed, tables, strict=True):
        row[: len(table)] = table
    return share(packed, np.array([len(table) for table in tables], np.int32), layer_bytes)


def groups_of(shared: SharedPrefix | None) -> list[tuple[list[int], int]]:
    if shared is None:
        return []
    starts, members = shared.member_starts.tolist(), shared.members.tolist()
    found = [
        (members[start:end], pages)
        for start, end, pages in zip(starts, starts[1:], shared.page_counts.tolist(), strict=False)
    ]
    assert all(bool(who) == (pages > 0) for who, pages in found)
    return [(who, pages) for who, pages in found if who]


def saved(shared: SharedPrefix | None) -> int:
    return sum((len(who) - 1) * pages for who, pages in groups_of(shared))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def partitions(things: list[int]) -> Iterator[list[list[int]]]:
    if not things:
        yield []
        return
    first, *others = things
    for rest in partitions(others):
        yield [[first], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [first, *part], *rest[i + 1 :]]


def most_saved(tables: Tables) -> int:
    """By trying every way to make groups."""
    ways = partitions(list(range(len(tables))))
    gains = (sum((len(p) - 1) * min(common(tables[p[0]], tables[b]) for b in p) for p in way) for way in ways)
    return max(gains)


@given(tables=forests())
def test_every_page_is_read_exactly_once_for_every_sequence(tables: Tables) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "LEAST_PAGES", 1)
        shared = plan(tables)
    together = [0] * len(tables)
    for who, pages in groups_of(shared):
        assert 2 <= len(who) <= MEMBERS and shared is not None and len(who) <= shared.max_members
        for b in who:
            assert together[b] == 0, "in two groups"
            assert pages <= len(tables[b]) and tables[b][:pages] == tables[who[0]][:pages]
            together[b] = pages
    if shared is not None:
        assert shared.first_pages.tolist() == together  # and the second pass reads all from there on
        sizes = (len(tables), len(tables) // 2 + 1, len(tables) // 2)
        assert tuple(map(len, (shared.members, shared.member_starts, shared.page_counts))) == sizes
        alone = [tables[b] for b in range(len(tables)) if not together[b]]
        assert all(common(a, b) == 0 for a, b in combinations(alone, 2)), "two could have shared"


@given(tables=forests(6))
def test_little_is_left_unsaved(tables: Tables) -> None:
    """Groups of runs can miss the best plan where prefixes nest, but never by much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "LEAST_PAGES", 1)
        assert 2 * most_saved(tables) / 3 <= saved(plan(tables)) <= most_saved(tables)


PROMPT = list(range(LEAST_PAGES))


def test_a_few_go_on_together_from_what_all_share() -> None:
    longer = [*PROMPT, *range(500, 500 + 3 * LEAST_PAGES)]
    tables = [[*PROMPT, 900], [*longer, 901], [*PROMPT, 902], [*longer, 903], [*PROMPT, 904], [7, 8]]
    found = sorted((sorted(who), pages) for who, pages in groups_of(plan(tables)))
    assert found == [([0, 2, 4], LEAST_PAGES), ([1, 3], 4 * LEAST_PAGES)]


@pytest.mark.parametrize("size", [2, MEMBERS, MEMBERS + 1, 2 * MEMBERS + 3])
def test_a_family_of_any_size(size: int) -> None:
    shared = plan([[*PROMPT, 900 + b] for b in range(size)])
    full, rest = divmod(size, MEMBERS)
    assert saved(shared) == (size - full - (rest > 0)) * LEAST_PAGES
    assert shared is not None and shared.max_members == min(size, MEMBERS)


def test_too_little_to_share() -> None:
    assert plan([]) is None
    assert plan([PROMPT]) is None
    assert plan([PROMPT, PROMPT]) is not None
    assert plan([PROMPT[1:], PROMPT[1:]]) is None
    assert plan([PROMPT, [99, *PROMPT]]) is None, "the same pages at other places"
    enough = -(-LEAST_BYTES // LEAST_PAGES)
    assert plan([PROMPT, PROMPT], enough) is not None
    assert plan([PROMPT, PROMPT], enough - 1) is None
    assert plan([PROMPT, PROMPT, PROMPT], enough // 2 + 1) is not None
