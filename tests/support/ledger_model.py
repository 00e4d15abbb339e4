"""Two pools and their ledgers beside memory that tells what was really written where; for random operations."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from services.block_manager.holds import FENCE_S
from services.block_manager.leases import LeaseRecord
from services.block_manager.ledger import Ledger
from services.block_manager.node import Node
from services.block_manager.pages import State
from services.block_manager.transfers import Transfer
from tests.support.ledgers import BLOCK, ManualClock, make_node

HOLDERS = ("p1", "p2", "d1", "d2")
Where = tuple[str, int]  # pool, block


class Sequence:
    """A worker's view of one lease: what it believes it holds, and the content it will write."""

    def __init__(self, lease: int, holder: str, text: str) -> None:
        self.lease, self.holder, self.text = lease, holder, text


class Straggler:
    """A worker whose lease has run out and that may be writing until `until_s`."""

    def __init__(self, holder: str, until_s: float) -> None:
        self.holder, self.until_s = holder, until_s


class LedgerModel(RuleBasedStateMachine):
    """What is set up, checked after every operation and cleaned up; subclasses add the operations.

    `content` is what a writer last put into a page, `granted` every handle ever given out, `writers` who may write.
    Places are pages, and behind them tails. Generations may be about to go round.
    """

    @initialize(blocks=st.integers(4, 12), tails=st.integers(1, 6), born=st.sampled_from([0, 2**32 - 2]))
    def create(self, blocks: int, tails: int, born: int) -> None:
        self.clock = ManualClock()
        self.node: Node = make_node(self.clock, blocks, tails, born)
        self.content: dict[Where, bytes] = {}
        self.granted: set[tuple[str, int, int]] = set()
        self.writers: dict[Where, object] = {}
        self.requests = itertools.count()

    # --- what is checked after everything ----------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "node"):
            assert self.node.check() == [] and self.node.audit() == []

    @invariant()
    def keys_stand_for_their_content(self) -> None:
        if hasattr(self, "node"):
            for pool, ledger in self.node.ledgers.items():
                for block, key in enumerate(ledger.pages.keys):
                    assert key is None or self.content[pool, block] == key

    def note(self, ledger: Ledger, blocks: list[int]) -> None:
        """Fresh pages: a handle never seen before, and nobody else writes there."""
        for block in blocks:
            handle = (ledger.pool, block, int(ledger.pages.generations[block]))
            assert handle not in self.granted
            assert (ledger.pool, block) not in self.writers, "a page was granted to which somebody may still be writing"
            self.granted.add(handle)
            self.content[ledger.pool, block] = b"garbage of the new tenant"

    def note_tail(self, record: LeaseRecord, ledger: Ledger) -> None:
        """A fresh tail: as with pages."""
        place = ledger.pages.total + record.tail
        handle = (ledger.pool, place, int(ledger.tails.generations[record.tail]))
        assert handle not in self.granted
        assert (ledger.pool, place) not in self.writers, "a tail was granted to which somebody may still be writing"
        self.granted.add(handle)

    def state(self) -> list[Any]:
        return [
            (bytes(one.pages.state), list(one.pages.refs), list(one.pages.keys), one.pages.generations.tolist(),
             {lease: (record.holder, record.deadline_s, list(record.pages)) for lease, record in one.leases.items()},
             one.tails.free, one.tails.generations.tolist(), one.pages.pinned)
            for one in self.node.ledgers.values()
        ]  # fmt: skip

    def oracle_hits(self, ledger: Ledger, keys: list[bytes], tokens: int) -> int:
        sealed = {key for key in ledger.pages.keys if key is not None}
        fitting = keys[: (tokens - 1) // BLOCK]
        return len(list(itertools.takewhile(sealed.__contains__, fitting)))

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, ledger: Ledger, record: LeaseRecord, keys: list[bytes]) -> None:
        for block, key in zip(record.pages, keys, strict=False):
            if ledger.pages.state[block] == State.FILLING:
                self.content[ledger.pool, block] = key

    def begin(self, transfer: Transfer, blocks: list[int]) -> None:
        for block in blocks:
            self.writers[transfer.target.pool, block] = transfer
        if transfer.target_hold.tail is not None:
            self.writers[transfer.target.pool, transfer.target.pages.total + transfer.target_hold.tail] = transfer

    def land(self, transfer: Transfer) -> None:
        """The mover has written: the source's content is now in the target."""
        for source, target in zip(transfer.source_hold.pages, transfer.target_hold.pages, strict=True):
            self.content[transfer.target.pool, target] = self.content[transfer.source.pool, source]

    def ended(self, transfer: Transfer) -> None:
        self.writers = {where: writer for where, writer in self.writers.items() if writer is not transfer}

    # --- lateness and death ------------------------------------------------------------------------------------------

    def linger(self, ledger: Ledger, record: LeaseRecord) -> None:
        """The holder has not noticed yet that its lease runs out now, and goes on writing."""
        for block in record.pages:
            where = (ledger.pool, block)
            if ledger.pages.state[block] == State.FILLING and where not in self.writers:
                self.writers[where] = Straggler(record.holder, self.clock.now + FENCE_S)
        self.writers.setdefault(
            (ledger.pool, ledger.pages.total + record.tail), Straggler(record.holder, self.clock.now + FENCE_S)
        )

    def stopped(self, writer: object) -> bool:
        return isinstance(writer, Straggler) and writer.until_s <= self.clock.now

    def gone(self, holder: str) -> None:
        """The process of `holder` has ended: it writes no more, and the ledgers hear of it."""
        self.writers = {
            where: writer
            for where, writer in self.writers.items()
            if not (isinstance(writer, Straggler) and writer.holder == holder)
        }
        for ledger in self.node.ledgers.values():
            ledger.holder_gone(holder)

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        for number in list(self.node.transfers.open):
            self.node.transfers.done(number)
        for holder in HOLDERS:
            self.gone(holder)
        self.clock.now += 1000
        for ledger in self.node.ledgers.values():
            ledger.expire()
            pages = ledger.pages
            assert pages.free + pages.cached == pages.total and ledger.tails.free == ledger.tails.total
            assert not ledger.leases and not list(ledger.holds) and pages.pinned == 0
        assert self.node.check() == []
