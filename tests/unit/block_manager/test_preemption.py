"""More pages for running sequences, and who has to go when there are none."""

from __future__ import annotations

import pytest

from services.block_manager.ledger import Ledger
from shared.errors import Busy
from tests.support.ledgers import BLOCK, chain, make_ledger, run_prompt


def decoding(ledger: Ledger, request: str, arrival_s: float, priority: int = 0, tokens: int = BLOCK) -> int:
    record = ledger.acquire("w", request, [], tokens, arrival_s=arrival_s, priority=priority)
    return ledger.adopt(record.lease, f"d-{request}").lease


def exhaust(ledger: Ledger) -> None:
    """Gives all that is left to the first lease."""
    record = ledger.leases[min(ledger.leases)]
    ledger.extend(record.holder, [(record.lease, ledger.pages.available)])


def test_the_newest_of_the_least_important_is_preempted_and_the_oldest_never() -> None:
    ledger = make_ledger(blocks=32)
    oldest = decoding(ledger, "a", 1.0)
    newer = decoding(ledger, "b", 2.0)
    unimportant_old = decoding(ledger, "c", 0.5, priority=5)
    unimportant_new = decoding(ledger, "e", 3.0, priority=5)
    exhaust(ledger)
    order = []
    for _ in range(3):
        result = ledger.extend("d-a", [(oldest, 1)])
        assert result.granted == [[]] and result.victim is not None
        again = ledger.extend("d-b", [(newer, 1)]) if newer in ledger.leases else result
        assert again.victim is result.victim  # one at a time, until it has gone
        order.append(result.victim.lease)
        ledger.release(result.victim.holder, [result.victim.lease])
        exhaust(ledger)
    assert order == [unimportant_new, unimportant_old, newer]
    alone = ledger.extend("d-a", [(oldest, 1)])
    assert alone.granted == [[]] and alone.victim is None
    assert ledger.check() == []


def test_the_requester_itself_may_be_the_victim() -> None:
    ledger = make_ledger()
    decoding(ledger, "a", 1.0)
    newest = decoding(ledger, "b", 2.0)
    exhaust(ledger)
    result = ledger.extend("d-b", [(newest, 1)])
    assert result.victim is not None and result.victim.lease == newest


def test_a_victim_must_free_something() -> None:
    ledger = make_ledger()
    shared = run_prompt(ledger, "ab")
    ledger.adopt(shared.lease, "d-a")
    decoding(ledger, "b", 2.0)
    twin = ledger.acquire("w", "twin", chain("ab"), 2 * BLOCK + 1, arrival_s=9.0)
    ledger.adopt(twin.lease, "d-t")
    twin.pages[2:], own = [], twin.pages[2:]  # a sequence whose pages are all shared
    ledger.pages.drop(own)
    exhaust(ledger)
    victim = ledger.extend("d-a", [(shared.lease, 1)]).victim
    assert victim is not None and victim.holder == "d-b"


def test_sequences_in_prefill_are_not_preempted() -> None:
    ledger = make_ledger()
    first = decoding(ledger, "a", 1.0)
    ledger.acquire("w", "r", [], BLOCK, arrival_s=2.0)
    exhaust(ledger)
    assert ledger.extend("d-a", [(first, 1)]).victim is None


def test_nobody_is_admitted_while_a_preemption_is_under_way() -> None:
    ledger = make_ledger(blocks=16)
    first, second = decoding(ledger, "a", 1.0), decoding(ledger, "b", 2.0)
    exhaust(ledger)
    ledger.extend("d-a", [(first, 1)])
    ledger.pages.drop([ledger.leases[first].pages.pop() for _ in range(9)])  # plenty of room appears
    with pytest.raises(Busy):
        ledger.acquire("w", "r", [], 1)
    ledger.release("d-b", [second])
    ledger.acquire("w", "r", [], 1)


def test_extensions_are_all_or_nothing_each() -> None:
    ledger = make_ledger(blocks=8)
    first, second = decoding(ledger, "a", 1.0), decoding(ledger, "b", 2.0)
    left = ledger.pages.available
    result = ledger.extend("d-b", [(second, left + 1), (first, 1), (second, left)])
    assert [len(blocks) for blocks in result.granted] == [0, 0, left]
    assert result.lost == [first]  # not d-b's
    assert ledger.check() == []
