"""A stream's page keys go on with the chain of its prompt; a hand-over becomes the right rows of the batch."""

from __future__ import annotations

import pytest
from opentelemetry.trace import INVALID_SPAN

from services.decode.stream import Stream, sequence_of
from shared import errors
from shared.handles import BlockTable, TailHandle, pack_u32
from shared.messages import Lease, Sampling, Work
from shared.prefix import page_keys, split_keys

BLOCK = 4


def work(length: int, salt: str | None = None) -> Work:
    return Work(
        request_id="r",
        gateway="g",
        tokens=pack_u32(range(length)),
        prompt_tokens=length - 1,
        max_tokens=50,
        sampling=Sampling(),
        eos_token_ids=[],
        arrival_s=0,
        cache_salt=salt,
    )


def lease(pages: int) -> Lease:
    table = BlockTable(pool="p", epoch=1, indices=pack_u32(range(10, 10 + pages)), generations=pack_u32([7] * pages))
    return Lease(lease=1, deadline_s=9, table=table, tail=TailHandle(slot=3, generation=5))


@pytest.mark.parametrize("length", [2, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_page_keys_are_those_of_the_whole_sequence(length: int, salt: str | None) -> None:
    stream = Stream(work(length, salt), 1, 0.0, INVALID_SPAN)
    expected = split_keys(page_keys("f00d", list(range(24)), BLOCK, salt))
    for at in range((length - 1) // BLOCK, 6):
        assert stream.page_key(list(range(at * BLOCK, (at + 1) * BLOCK)), at, "f00d", BLOCK) == expected[at], at


@pytest.mark.parametrize(("length", "pages", "tail"), [(2, 0, 1), (4, 0, 3), (5, 1, 0), (6, 1, 1), (9, 2, 0)])
def test_all_but_the_last_token_are_in_pages_and_tail(length: int, pages: int, tail: int) -> None:
    sequence = sequence_of(work(length), lease(pages + 1), BLOCK, 100, 64)
    assert sequence.table.tolist() == list(range(10, 10 + pages)) and len(sequence.generations) == pages
    assert sequence.tail_tokens == list(range(pages * BLOCK, pages * BLOCK + tail))
    assert sequence.next_token == length - 1
    assert list(sequence.ready) == [(10 + pages, 7)]
    assert (sequence.tail_slot, sequence.tail_generation) == (3, 5)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(errors.BadRequest, match="pages"):
        sequence_of(work(9), lease(1), BLOCK, 100, 64)
    with pytest.raises(errors.TooLarge):
        sequence_of(work(64), lease(20), BLOCK, 100, 64)
