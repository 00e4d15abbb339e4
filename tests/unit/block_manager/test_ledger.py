"""What an admission finds, gets and leaves alone, and what pins keep."""

from __future__ import annotations

import pytest

from services.block_manager.reserve import base_reserve, longest
from shared.errors import Busy, TooLarge
from tests.support.ledgers import BLOCK, ManualClock, chain, counts, make_ledger, run_prompt, snapshot

# --- hits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [(1, 0), (BLOCK - 1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK)],
)
def test_at_least_one_token_is_computed(tokens: int, cached: int) -> None:
    ledger = make_ledger()
    ledger.release("w", [run_prompt(ledger, "xy").lease])
    record = ledger.acquire("w", "r", chain("xy")[: tokens // BLOCK], tokens)
    assert record.cached_tokens == cached
    assert len(record.pages) == tokens // BLOCK + 1


def test_only_committed_pages_are_found() -> None:
    ledger = make_ledger()
    keys = chain("xyz")
    first = ledger.acquire("w", "r1", keys, 3 * BLOCK + 1)
    assert ledger.match(keys, 99) == []
    ledger.commit("w", first.lease, 0, keys[:2])
    ledger.release("w", [first.lease])  # aborted before page z was written
    second = ledger.acquire("w", "r2", keys, 3 * BLOCK + 1)
    assert second.cached_tokens == 2 * BLOCK and second.pages[:2] == first.pages[:2]
    assert counts(ledger) == (12, 2, 2, 0, 0)


def test_a_page_granted_again_is_not_found_under_its_old_key() -> None:
    ledger = make_ledger(blocks=8)
    ledger.release("w", [run_prompt(ledger, "abcd").lease])
    old = {block: int(ledger.pages.generations[block]) for block in ledger.match(chain("abcd"), 99)}
    big = ledger.acquire("w", "r", [], 6 * BLOCK)
    ledger.extend("w", [(big.lease, 1)])
    assert len(big.pages) == 8 and ledger.match(chain("abcd"), 99) == []
    assert all(ledger.pages.generations[block] != generation for block, generation in old.items())
    assert ledger.check() == []


def test_losing_one_of_two_equal_pages_keeps_the_other() -> None:
    ledger = make_ledger(blocks=8)
    keys = chain("a")
    one = ledger.acquire("w", "r1", keys, BLOCK + 1)
    two = ledger.acquire("w", "r2", keys, BLOCK + 1)  # computed at the same time: neither hits
    for record in (one, two):
        ledger.commit("w", record.lease, 0, keys)
    assert one.pages[0] != two.pages[0]
    ledger.release("w", [one.lease])
    big = ledger.acquire("w", "r4", [], 3 * BLOCK)
    assert ledger.extend("w", [(big.lease, 2)]).granted[0]  # evicts the idle one of the two
    assert ledger.match(keys, 99) == [two.pages[0]]
    assert ledger.check() == []


def test_prefixes_outlive_their_suffixes() -> None:
    ledger = make_ledger(blocks=8)
    ledger.release("w", [run_prompt(ledger, "abcd").lease])
    ledger.acquire("w", "r", [], 5 * BLOCK)  # six pages: two of four cached ones must go
    assert len(ledger.match(chain("abcd"), 99)) == 2


def test_hits_are_refreshed_by_use() -> None:
    ledger = make_ledger(blocks=8)
    for text in ("a", "b", "c"):
        ledger.release("w", [run_prompt(ledger, text).lease])
    ledger.release("w", [run_prompt(ledger, "a").lease])
    ledger.acquire("w", "r", [], 6 * BLOCK - 1)  # six pages: one cached page goes, b is the oldest
    assert [len(ledger.match(chain(text), 99)) for text in "abc"] == [1, 0, 1]


def test_a_request_is_counted_once_however_often_it_is_tried() -> None:
    ledger = make_ledger()
    ledger.release("w", [run_prompt(ledger, "ab").lease])
    for _ in range(3):
        record = ledger.acquire("w", "r", chain("abc"), 3 * BLOCK + 1)
        ledger.count(record, 3 * BLOCK + 1)
        ledger.commit("w", record.lease, 0, chain("abc"))
        ledger.release("w", [record.lease])
    assert (ledger.hits.prompt_tokens, ledger.hits.hit_tokens) == (3 * BLOCK + 1, 2 * BLOCK)


# --- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [4, 16, 199, 200, 201, 1000])
def test_the_longest_sequence_fits_and_one_token_more_is_refused(blocks: int) -> None:
    ledger = make_ledger(blocks=blocks)
    assert ledger.max_model_len == longest(blocks, BLOCK) == (blocks - base_reserve(blocks)) * BLOCK
    record = ledger.acquire("w", "r", [], ledger.max_model_len)
    ledger.release("w", [record.lease])
    for tokens in (ledger.max_model_len + 1, 10 * ledger.max_model_len):
        with pytest.raises(TooLarge, match=str(ledger.max_model_len)):
            ledger.acquire("w", "r", [], tokens)
    assert ledger.check() == []


def test_a_refusal_changes_nothing() -> None:
    ledger = make_ledger(blocks=8)
    ledger.release("w", [run_prompt(ledger, "ab").lease])
    ledger.acquire("w", "r1", [], 3 * BLOCK)
    before = snapshot(ledger)
    with pytest.raises(Busy) as caught:
        ledger.acquire("w", "r2", chain("abc"), 4 * BLOCK)
    assert caught.value.retry_after_s
    assert snapshot(ledger) == before


def test_no_tail_is_busy_too() -> None:
    ledger = make_ledger(tails=1)
    first = ledger.acquire("w", "r1", [], 1)
    with pytest.raises(Busy):
        ledger.acquire("w", "r2", [], 1)
    ledger.release("w", [first.lease])
    assert ledger.fed()
    ledger.acquire("w", "r2", [], 1)


def test_admission_leaves_a_page_for_each_sequence_that_decodes() -> None:
    ledger = make_ledger(blocks=8)
    for request in ("r1", "r2", "r3"):
        ledger.adopt(ledger.acquire("w", request, [], 1).lease, "d")
    assert ledger.reserve == 5 and ledger.pages.available == 5
    with pytest.raises(Busy):
        ledger.acquire("w", "r4", [], 1)
    assert not ledger.fed()
    ledger.release("d", [min(ledger.leases)])
    assert ledger.fed() and not ledger.fed()
    ledger.acquire("w", "r4", [], 1)


def test_cached_pages_that_are_hit_are_not_counted_as_room() -> None:
    ledger = make_ledger(blocks=8)
    ledger.release("w", [run_prompt(ledger, "abc").lease])
    ledger.acquire("w", "other", [], 1)
    assert ledger.pages.available == 7
    with pytest.raises(Busy):
        ledger.acquire("w", "r", chain("abcde"), 5 * BLOCK + 1)  # 3 hits and 3 fresh would leave 1 < 2
    ledger.acquire("w", "r", chain("abcd"), 4 * BLOCK + 1)


def test_grants_are_contiguous_if_they_can_be_and_sequences_grow_in_place() -> None:
    ledger = make_ledger(blocks=32)
    record = ledger.acquire("w", "r", [], 5 * BLOCK)
    assert record.pages == list(range(record.pages[0], record.pages[0] + 6))
    grown = ledger.extend("w", [(record.lease, 2)]).granted[0]
    assert grown == [record.pages[5] + 1, record.pages[5] + 2]


# --- pins ------------------------------------------------------------------------------------------------------------


def test_pinned_pages_are_not_evicted_until_the_pin_runs_out() -> None:
    clock = ManualClock()
    ledger = make_ledger(blocks=8, clock=clock)
    ledger.release("w", [run_prompt(ledger, "ab").lease])
    assert ledger.pin([*chain("ab"), b"?" * 16], 60) == 2
    ledger.acquire("w", "small", [], 1)
    with pytest.raises(Busy):
        ledger.acquire("w", "r", [], 3 * BLOCK)  # 4 of the 5 others would leave 1
    clock.now += 60
    ledger.renew("w", list(ledger.leases))
    ledger.expire()
    ledger.acquire("w", "r", [], 3 * BLOCK)
    assert ledger.pages.pinned == 0 and ledger.check() == []


def test_unpinning_and_pinning_again() -> None:
    ledger = make_ledger()
    record = run_prompt(ledger, "ab")
    assert ledger.pin(chain("ab"), 60) == 2  # in use: pinned all the same
    assert ledger.pin(chain("ab"), 30) == 2
    ledger.release("w", [record.lease])
    assert (ledger.pages.cached, ledger.pages.idle_pins) == (2, 2)
    assert ledger.pin(chain("a"), 0) == 0 and ledger.pages.idle_pins == 1
    assert ledger.check() == []


def test_at_most_half_of_the_pool_can_be_pinned() -> None:
    ledger = make_ledger(blocks=12)
    ledger.release("w", [run_prompt(ledger, "abcdefgh").lease])
    assert ledger.pin(chain("abcdefgh"), 60) == 6


def test_pins_yield_rather_than_stop_a_sequence_for_good() -> None:
    ledger = make_ledger(blocks=8)
    ledger.release("w", [run_prompt(ledger, "abcd").lease])
    assert ledger.pin(chain("abcd"), 60) == 4
    record = ledger.acquire("w", "r", [], ledger.max_model_len)  # nobody else is there: admitted
    assert len(record.pages) == 7 and ledger.pages.pinned == 1
    ledger.adopt(record.lease, "d")
    assert ledger.extend("d", [(record.lease, 1)]).granted[0]
    assert ledger.pages.pinned == 0 and ledger.check() == []
