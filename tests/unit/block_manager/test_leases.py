"""The life of a lease: committed under, adopted, renewed, given back, run out."""

from __future__ import annotations

import pytest

from services.block_manager.holds import FENCE_S
from services.block_manager.ledger import LEASE_S
from services.block_manager.pages import State
from shared.errors import BadRequest, Conflict, Stale
from tests.support.ledgers import BLOCK, ManualClock, chain, counts, make_ledger, run_prompt, snapshot

# --- commit, adopt, release ------------------------------------------------------------------------------------------


def test_commits_are_idempotent_and_checked() -> None:
    ledger = make_ledger()
    keys = chain("ab")
    record = ledger.acquire("w", "r", keys, 2 * BLOCK)
    assert ledger.commit("w", record.lease, 1, keys[1:])
    assert ledger.commit("w", record.lease, 0, keys) and ledger.commit("w", record.lease, 0, keys)
    before = snapshot(ledger)
    with pytest.raises(Conflict):
        ledger.commit("w", record.lease, 0, chain("z"))
    with pytest.raises(BadRequest):
        ledger.commit("w", record.lease, 2, keys)
    assert not ledger.commit("other", record.lease, 0, keys) and not ledger.commit("w", 999, 0, keys)
    assert snapshot(ledger) == before and ledger.leases.unknown == 2


def test_a_lease_is_adopted_once() -> None:
    ledger = make_ledger()
    record = ledger.acquire("w", "r", [], 1)
    assert ledger.adopt(record.lease, "d1") is record
    assert ledger.adopt(record.lease, "d1") is record
    with pytest.raises(Conflict):
        ledger.adopt(record.lease, "d2")
    ledger.release("w", [record.lease])  # prefill is late: it is not its lease any more
    assert record.lease in ledger.leases and ledger.leases.unknown == 1
    ledger.release("d1", [record.lease, record.lease])
    assert ledger.leases.unknown == 2
    with pytest.raises(Stale):
        ledger.adopt(record.lease, "d1")
    assert counts(ledger) == (16, 0, 0, 0, 0) and ledger.check() == []


# --- expiry and death ------------------------------------------------------------------------------------------------


def test_leases_that_are_not_renewed_run_out() -> None:
    clock = ManualClock()
    ledger = make_ledger(clock=clock)
    kept, dropped = ledger.acquire("w", "r1", [], 1), ledger.acquire("w", "r2", [], 1)
    clock.now += LEASE_S - 0.1
    assert ledger.renew("w", [kept.lease, 999]) == [999]
    assert ledger.renew("other", [kept.lease]) == [kept.lease]
    assert ledger.expire() == []
    clock.now += 0.2
    assert ledger.expire() == [dropped] and ledger.expired_leases == 1
    assert list(ledger.leases) == [kept.lease]


def test_after_an_idle_hour_everything_is_as_it_was() -> None:
    clock = ManualClock()
    ledger = make_ledger(clock=clock)
    ledger.release("w", [run_prompt(ledger, "ab").lease])
    before = snapshot(ledger)
    for _ in range(60):
        clock.now += 60
        assert ledger.expire() == []
    assert snapshot(ledger) == before
    record = ledger.acquire("w", "late", chain("ab"), 2 * BLOCK + 1)
    assert record.cached_tokens == 2 * BLOCK and record.deadline_s == clock.now + LEASE_S
    assert ledger.adopt(record.lease, "d") is record
    ledger.release("d", [record.lease])
    assert ledger.check() == []


def test_what_a_vanished_holder_may_still_write_is_quarantined() -> None:
    clock = ManualClock()
    ledger = make_ledger(clock=clock)
    record = run_prompt(ledger, "ab")
    clock.now += LEASE_S
    ledger.expire()
    assert counts(ledger) == (13, 0, 0, 2, 1) and ledger.tails.free == 7
    assert ledger.pages.state[record.pages[2]] == State.QUARANTINED
    clock.now += FENCE_S - 1
    ledger.expire()
    assert ledger.pages.quarantined == 1
    clock.now += 1
    ledger.expire()
    assert counts(ledger) == (14, 0, 0, 2, 0) and ledger.tails.free == 8
    assert ledger.check() == []


def test_a_holder_that_hears_of_its_loss_has_one_term_to_stop() -> None:
    clock = ManualClock()
    ledger = make_ledger(clock=clock)
    record = ledger.acquire("w", "r", [], 1)
    clock.now += LEASE_S
    ledger.expire()
    assert ledger.renew("w", [record.lease]) == [record.lease]
    clock.now += LEASE_S - 0.1
    ledger.renew("w", [])
    ledger.expire()
    assert ledger.pages.quarantined == 1
    clock.now += 0.1
    ledger.expire()
    assert ledger.pages.quarantined == 0 and ledger.check() == []


def test_a_dead_holder_gives_everything_back_at_once_and_only_it() -> None:
    clock = ManualClock()
    ledger = make_ledger(clock=clock)
    ledger.acquire("w1", "r1", [], 1)
    clock.now += LEASE_S
    ledger.expire()
    other = ledger.acquire("w2", "r2", [], 1)
    ledger.acquire("w1", "r3", [], 1)
    assert (ledger.pages.quarantined, ledger.pages.filling) == (1, 2)
    assert [record.request_id for record in ledger.holder_gone("w1")] == ["r3"]
    assert counts(ledger) == (15, 1, 0, 0, 0) and list(ledger.leases) == [other.lease]
    assert ledger.holder_gone("w1") == [] and ledger.check() == []
