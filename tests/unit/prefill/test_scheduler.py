"""Chunks cover a prompt exactly, page by page; running prompts take turns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prefill.scheduler import Prompt, RoundRobin

BLOCK = 16


def prompt(length: int, cached: int = 0, name: str = "r") -> Prompt:
    pages = np.arange(length // BLOCK, dtype=np.int32)
    return Prompt((name, 0), np.arange(length), pages, pages.astype(np.uint32), 0, 0, cached, BLOCK)


@given(length=st.integers(1, 600), cached_pages=st.integers(0, 40), chunk_pages=st.integers(1, 20))
def test_chunks_cover_the_prompt_once(length: int, cached_pages: int, chunk_pages: int) -> None:
    cached = min(cached_pages * BLOCK, (length - 1) // BLOCK * BLOCK)
    job = prompt(length, cached)
    at, pages = cached, cached // BLOCK
    while True:
        chunk = job.next_chunk(chunk_pages * BLOCK)
        assert chunk.start == at < chunk.stop <= at + chunk_pages * BLOCK
        assert chunk.first_page == pages
        assert chunk.pages * BLOCK + chunk.tail == chunk.stop - chunk.start
        assert chunk.tail == 0 or chunk.last
        at, pages = chunk.stop, pages + chunk.pages
        job.advance(chunk)
        if chunk.last:
            break
    assert at == length and pages == length // BLOCK and chunk.tail == length % BLOCK


@pytest.mark.parametrize(("length", "cached"), [(32, 32), (32, 8), (16, -16)])
def test_refuses_what_is_not_whole_pages(length: int, cached: int) -> None:
    with pytest.raises(ValueError, match="cached"):
        prompt(length, cached)


def test_refuses_a_table_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="pages"):
        Prompt(("r", 0), np.arange(40), np.arange(1), np.arange(1), 0, 0, 0, BLOCK)


def test_prompts_take_turns_and_a_new_one_waits_one_chunk_each() -> None:
    turns = RoundRobin()
    a, b, c = (prompt(99, name=name) for name in "abc")
    assert turns.next() is None
    turns.add(a)
    turns.add(b)
    assert [turns.next(), turns.next(), turns.next()] == [a, b, a]
    turns.add(c)
    assert [turns.next(), turns.next(), turns.next()] == [b, a, c]
    assert turns.remove(("a", 0)) is a and turns.remove(("a", 0)) is None
    assert [turns.next(), turns.next()] == [b, c] and len(turns) == 2
