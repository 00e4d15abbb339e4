"""Two pools as one: hits that are a copy away, leases that move, copies that fail or never answer."""

from __future__ import annotations

import pytest

from services.block_manager.leases import LeaseRecord
from services.block_manager.node import Grant, Move, Node, named
from services.block_manager.pages import State
from shared.errors import BadRequest, Busy, Conflict, NotFound, Stale, TooLarge
from shared.messages import Acquire
from tests.support.ledgers import BLOCK, ManualClock, chain, make_ledger, make_node, run_prompt


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def node(clock: ManualClock) -> Node:
    return make_node(clock)


def acquire(node: Node, text: str, pool: str = "a", imports: bool = True, request_id: str = "r") -> Grant:
    message = Acquire(
        holder="p", pool=pool, request_id=request_id, keys=b"".join(chain(text)), tokens=BLOCK * len(text) + 1
    )
    return node.acquire(message, imports=imports)


def moving(node: Node, text: str = "xyz") -> Move:
    """A prefilled lease in pool a on its way into pool b."""
    record = run_prompt(node.ledgers["a"], text, "p")
    move = node.adopt(record.lease, "d", "b")
    assert isinstance(move, Move)
    move.waiting = 1
    return move


def everything_back(node: Node) -> bool:
    pages = [ledger.pages for ledger in node.ledgers.values()]
    tails = [ledger.tails for ledger in node.ledgers.values()]
    return (
        all(one.free + one.cached == one.total for one in pages)
        and all(one.free == one.total for one in tails)
        and not node.check()
    )


# --- acquire ---------------------------------------------------------------------------------------------------------


def test_what_only_another_pool_has_is_copied_in_and_counts_as_hit(node: Node) -> None:
    node.release("w", [run_prompt(node.ledgers["a"], "x").lease])
    node.release("w", [run_prompt(node.ledgers["b"], "xyz").lease])
    grant = acquire(node, "xyzz")
    transfer = grant.transfer
    assert transfer is not None and grant.first == 1 and transfer.keys == chain("xyz")[1:]
    assert transfer.target_hold.pages == grant.record.pages[1:3]
    assert transfer.source_hold.pages == node.ledgers["b"].match(chain("xyz"), 99)[1:]
    assert node.ledgers["a"].match(chain("xyz"), 99) == grant.record.pages[:1]  # not before the copy is verified
    assert node.imported(grant)
    assert grant.record.cached_tokens == 3 * BLOCK
    assert node.ledgers["a"].match(chain("xyz"), 99) == grant.record.pages[:3]
    node.release("p", [grant.record.lease])
    assert everything_back(node)


def test_a_failed_copy_is_a_miss(node: Node) -> None:
    node.release("w", [run_prompt(node.ledgers["b"], "xy").lease])
    grant = acquire(node, "xy")
    assert grant.transfer is not None
    node.fail(grant.ledger, grant.record, grant.transfer, proven=True)
    assert everything_back(node)
    retried = acquire(node, "xy", imports=False)
    assert retried.transfer is None and retried.record.cached_tokens == 0


def test_a_copy_without_an_answer_keeps_its_targets_quarantined_until_it_is_proven(node: Node) -> None:
    node.release("w", [run_prompt(node.ledgers["b"], "xy").lease])
    grant = acquire(node, "xy")
    transfer = grant.transfer
    assert transfer is not None
    targets = list(transfer.target_hold.pages)
    node.fail(grant.ledger, grant.record, transfer, proven=False)
    pages = node.ledgers["a"].pages
    assert [pages.state[block] for block in targets] == [State.QUARANTINED] * 2 and pages.quarantined == 2
    assert node.ledgers["b"].pages.active == 0  # the sources are only read
    again = acquire(node, "xy", imports=False)
    assert set(again.record.pages).isdisjoint(targets)
    assert node.transfers.done(transfer.transfer)
    assert not node.transfers.done(transfer.transfer) and node.transfers.late == 1
    node.release("p", [again.record.lease])
    assert everything_back(node)


def test_the_same_page_is_copied_once_for_all_who_want_it(node: Node) -> None:
    node.release("w", [run_prompt(node.ledgers["b"], "xy").lease])
    grant = acquire(node, "xy")
    transfer = grant.transfer
    assert transfer is not None
    assert node.awaited("a", chain("xyz"), 99) is transfer
    assert node.awaited("a", chain("zz"), 99) is None
    assert node.awaited("b", chain("xyz"), 99) is None
    assert node.awaited("a", chain("xy"), BLOCK) is None  # wants no page of it
    node.imported(grant)
    assert node.awaited("a", chain("xyz"), 99) is None
    assert acquire(node, "xyz", request_id="r2").record.cached_tokens == 2 * BLOCK


def test_a_lease_that_ended_during_its_import_is_not_granted(node: Node) -> None:
    node.release("w", [run_prompt(node.ledgers["b"], "xy").lease])
    grant = acquire(node, "xy")
    node.ledgers["a"].holder_gone("p")
    assert not node.imported(grant)
    assert everything_back(node) and node.ledgers["a"].match(chain("xy"), 99) == []


def test_unknown_pools_and_ragged_keys_are_refused(node: Node) -> None:
    with pytest.raises(NotFound, match="a, b"):
        node.ledger("c")
    with pytest.raises(BadRequest):
        named(b"x" * 17)


# --- adopt -----------------------------------------------------------------------------------------------------------


def test_adopting_in_the_same_pool_moves_nothing(node: Node) -> None:
    record = run_prompt(node.ledgers["a"], "xy", "p")
    assert node.adopt(record.lease, "d", "a") is record
    assert record.holder == "d" and record.decoding


def test_a_lease_moves_with_its_pages_its_tail_and_its_number(node: Node) -> None:
    b = node.ledgers["b"]
    node.release("w", [run_prompt(b, "x").lease])
    move = moving(node)
    assert move.first == 1
    assert move.transfer.source_hold.pages == move.origin.pages[1:]  # y, z and the page ahead
    assert move.transfer.target_hold.pages == move.record.pages[1:]
    assert move.transfer.source_hold.tail == move.origin.tail and move.transfer.target_hold.tail == move.record.tail
    assert node.moved(move) is move.record
    lease = move.origin.lease
    assert lease not in node.ledgers["a"].leases and node.of(lease) is b
    assert b.match(chain("xyz"), 99) == move.record.pages[:3]
    assert move.record.decoding and move.record.holder == "d"
    assert node.renew("d", [lease]) == []
    assert node.adopt(lease, "d", "b") is move.record  # asked again
    with pytest.raises(Conflict):
        node.adopt(lease, "d2", "b")
    node.release("d", [lease])
    assert everything_back(node) and node.ledgers["a"].pages.cached == 3


def test_while_a_lease_moves_it_is_still_where_it_was(node: Node) -> None:
    move = moving(node)
    lease = move.record.lease
    with pytest.raises(Conflict):
        node.adopt(lease, "d2", "b")
    assert node.renew("p", [lease]) == [] and node.renew("d", [lease]) == []
    node.unmoved(move, proven=True)
    assert node.of(lease) is node.ledgers["a"] and move.origin.holder == "p" and not move.origin.decoding
    assert node.ledgers["b"].pages.free == 16
    assert isinstance(node.adopt(lease, "d2", "b"), Move)


@pytest.mark.parametrize("proven", [True, False])
def test_a_cancel_during_a_move_recycles_nothing_under_the_copy(node: Node, proven: bool) -> None:
    move = moving(node)
    a, b = node.ledgers["a"], node.ledgers["b"]
    sources, targets = list(move.transfer.source_hold.pages), list(move.transfer.target_hold.pages)
    node.release("p", [move.record.lease])
    b.holder_gone("d")
    # pressure on both sides takes all the rest
    taken = [ledger.pages.take(ledger.pages.available) for ledger in (a, b)]
    assert set(taken[0]).isdisjoint(sources) and set(taken[1]).isdisjoint(targets)
    if proven:
        with pytest.raises(Stale):
            node.moved(move)
    else:
        node.unmoved(move, proven=False)
        assert b.pages.quarantined == len(targets) and not node.transfers.copying("b", chain("xyz")[0])
        node.transfers.done(move.transfer.transfer)
    for ledger, blocks in zip((a, b), taken, strict=True):
        ledger.pages.drop(blocks)
    assert everything_back(node)


def test_a_move_nobody_waits_for_is_undone(node: Node) -> None:
    move = moving(node)
    move.waiting = 0
    with pytest.raises(Stale):
        node.moved(move)
    assert node.of(move.record.lease, "p") is node.ledgers["a"]
    node.release("p", [move.record.lease])
    assert everything_back(node)


def test_a_full_pool_refuses_and_the_lease_stays(node: Node) -> None:
    record = run_prompt(node.ledgers["a"], "xyz", "p")
    b = node.ledgers["b"]
    blocker = b.acquire("w", "r", [], 11 * BLOCK)
    with pytest.raises(Busy):
        node.adopt(record.lease, "d", "b")
    assert record.holder == "p" and not node.moving and b.leases == {blocker.lease: blocker}
    b.release("w", [blocker.lease])
    assert b.fed()
    assert isinstance(node.adopt(record.lease, "d", "b"), Move)


def test_a_lease_that_can_never_fit_is_too_large(clock: ManualClock) -> None:
    node = Node([make_ledger(32, 4, clock, "a"), make_ledger(8, 4, clock, "b")], iter(range(100)))
    record = run_prompt(node.ledgers["a"], "x" * 9, "p")
    with pytest.raises(TooLarge):
        node.adopt(record.lease, "d", "b")


def test_an_unknown_lease_is_stale(node: Node) -> None:
    with pytest.raises(Stale):
        node.adopt(12345, "d", "b")
    assert node.awaited_by_move(12345, "b") is None


def test_moves_wait_for_pages_that_are_on_their_way(node: Node) -> None:
    first = moving(node)
    twin = acquire(node, "xyz", request_id="twin").record
    assert node.awaited_by_move(twin.lease, "b") is first.transfer
    node.moved(first)
    assert node.awaited_by_move(twin.lease, "b") is None
    second = node.adopt(twin.lease, "d", "b")
    assert isinstance(second, Move) and second.first == 3


def test_batches_find_each_lease_in_its_pool(node: Node) -> None:
    one, two = run_prompt(node.ledgers["a"], "x"), run_prompt(node.ledgers["b"], "y")
    granted, result = node.extend("w", [(one.lease, 1), (999, 1), (two.lease, 2)])
    assert [(ledger.pool, len(blocks)) for ledger, blocks in granted] == [("a", 1), ("a", 0), ("b", 2)]
    assert result.lost == [999]
    assert node.renew("w", [one.lease, two.lease, 999]) == [999]
    node.release("w", [two.lease, one.lease, 999])
    assert everything_back(node)
    assert isinstance(one, LeaseRecord)
