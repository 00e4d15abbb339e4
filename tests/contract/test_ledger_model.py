"""The ledgers of a node under random operations, against memory that tells what was really written where.

The model keeps, for every page of two pools, the content a writer last put there. Whatever happens: the books are
right after every step, a hit holds exactly the content its key stands for, no two tenancies share a handle, nobody but
its holder can be writing to a page that is granted, and in the end every page and tail comes back.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.block_manager.holds import FENCE_S
from services.block_manager.leases import LeaseRecord
from services.block_manager.ledger import LEASE_S, Ledger
from services.block_manager.node import Grant, Move, Node
from services.block_manager.pages import State
from services.block_manager.transfers import Transfer
from shared.errors import Busy, KvrelayError, Stale, TooLarge
from shared.messages import Acquire
from tests.support.ledgers import BLOCK, ManualClock, chain, make_node

HOLDERS = ("p1", "p2", "d1", "d2")
POOLS = st.sampled_from("ab")
OUTCOMES = st.sampled_from(["copied", "unwanted", "failed", "unproven"])
TEXTS = st.sampled_from(["", "x", "xy", "xyz", "xyzx", "xyzxy", "y", "yy"])
Where = tuple[str, int]  # pool, block


class Sequence:
    """A worker's view of one lease: what it believes it holds, and the content it will write."""

    def __init__(self, lease: int, holder: str, text: str) -> None:
        self.lease, self.holder, self.text = lease, holder, text


class Straggler:
    """A worker whose lease has run out and that may be writing until `until_s`."""

    def __init__(self, holder: str, until_s: float) -> None:
        self.holder, self.until_s = holder, until_s


class LedgerMachine(RuleBasedStateMachine):
    sequences: Bundle[Sequence] = Bundle("sequences")
    copies: Bundle[Any] = Bundle("copies")

    @initialize(blocks=st.integers(6, 12), tails=st.integers(3, 6))
    def create(self, blocks: int, tails: int) -> None:
        self.clock = ManualClock()
        self.node: Node = make_node(self.clock, blocks, tails)
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

    def state(self) -> list[Any]:
        return [
            (bytes(one.pages.state), list(one.pages.refs), list(one.pages.keys), one.pages.generations.tolist(),
             sorted(one.leases), one.tails.free)
            for one in self.node.ledgers.values()
        ]  # fmt: skip

    def oracle_hits(self, ledger: Ledger, keys: list[bytes], tokens: int) -> int:
        sealed = {key for key in ledger.pages.keys if key is not None}
        fitting = keys[: (tokens - 1) // BLOCK]
        return len(list(itertools.takewhile(sealed.__contains__, fitting)))

    # --- workers -----------------------------------------------------------------------------------------------------

    @rule(
        target=sequences,
        pool=POOLS,
        holder=st.sampled_from(HOLDERS[:2]),
        text=TEXTS,
        extra=st.integers(0, BLOCK - 1),
        priority=st.integers(0, 1),
    )
    def acquire(self, pool: str, holder: str, text: str, extra: int, priority: int) -> Any:
        grant = self.admit(pool, holder, text, extra, priority, imports=False)
        return multiple() if grant is None else Sequence(grant.record.lease, holder, text)

    def admit(self, pool: str, holder: str, text: str, extra: int, priority: int, imports: bool) -> Grant | None:
        ledger, tokens = self.node.ledger(pool), BLOCK * len(text) + extra or 1
        number, before = next(self.requests), self.state()
        expected = self.oracle_hits(ledger, chain(text), tokens)
        message = Acquire(
            holder=holder,
            pool=pool,
            request_id=f"r{number}",
            keys=b"".join(chain(text)),
            tokens=tokens,
            priority=priority,
            arrival_s=number,
        )
        try:
            grant = self.node.acquire(message, imports=imports)
        except (Busy, TooLarge) as refusal:
            assert self.state() == before
            assert isinstance(refusal, Busy) or tokens > ledger.max_model_len
            return None
        record = grant.record
        assert record.cached_tokens == expected * BLOCK and len(record.pages) == tokens // BLOCK + 1
        self.note(ledger, record.pages[expected:])
        return grant

    @rule(target=copies, pool=POOLS, text=TEXTS)
    def bring_in(self, pool: str, text: str) -> Any:
        """A prompt that may have more of its pages in the other pool."""
        grant = self.admit(pool, "p1", text, 1, 0, imports=True)
        if grant is None or grant.transfer is None:
            return multiple()
        count = len(grant.transfer.source_hold.pages)
        self.begin(grant.transfer, grant.record.pages[grant.first : grant.first + count])
        return grant

    def begin(self, transfer: Transfer, blocks: list[int]) -> None:
        for block in blocks:
            self.writers[transfer.target.pool, block] = transfer

    @rule(target=sequences, pool=POOLS, text=TEXTS, decodes=st.booleans(), priority=st.integers(0, 1))
    def serve(self, pool: str, text: str, decodes: bool, priority: int) -> Any:
        """A whole prefill at once, and the hand-over to decode in the same pool."""
        sequence = self.acquire(pool, "p1", text, 1, priority)
        if not isinstance(sequence, Sequence):
            return multiple()
        self.write_and_commit(sequence, len(text))
        if decodes:
            self.node.adopt(sequence.lease, "d1", pool)
            sequence.holder = "d1"
        return sequence

    @rule(target=sequences, pool=POOLS, text=TEXTS)
    def twins(self, pool: str, text: str) -> Any:
        """Two requests compute the same prompt at the same time, and both publish it."""
        twins = [self.acquire(pool, holder, text, 1, 0) for holder in ("p1", "p2")]
        admitted = [sequence for sequence in twins if isinstance(sequence, Sequence)]
        for sequence in admitted:
            self.write_and_commit(sequence, len(text))
        return multiple(*admitted)

    @rule(sequence=sequences, upto=st.sampled_from([1, 6]))
    def write_and_commit(self, sequence: Sequence, upto: int) -> None:
        ledger = self.node.of(sequence.lease, sequence.holder)
        record = ledger.leases.get(sequence.lease)
        keys = chain(sequence.text)[:upto]
        if record is None or record.holder != sequence.holder:
            assert not ledger.commit(sequence.holder, sequence.lease, 0, keys)
            return
        self.write(ledger, record, keys)
        assert ledger.commit(sequence.holder, sequence.lease, 0, keys)

    def write(self, ledger: Ledger, record: LeaseRecord, keys: list[bytes]) -> None:
        for block, key in zip(record.pages, keys, strict=False):
            if ledger.pages.state[block] == State.FILLING:
                self.content[ledger.pool, block] = key

    @rule(sequence=sequences, pages=st.integers(1, 3))
    def extend(self, sequence: Sequence, pages: int) -> None:
        ledger = self.node.of(sequence.lease, sequence.holder)
        available, decoding = ledger.pages.available, [one for one in ledger.leases.values() if one.decoding]
        oldest = min(decoding, key=lambda one: one.rank, default=None)
        granted, result = self.node.extend(sequence.holder, [(sequence.lease, pages)])
        blocks = granted[0][1]
        assert len(blocks) in (0, pages)
        self.note(ledger, blocks)
        if result.lost:
            assert not blocks
        elif pages <= available:
            assert blocks
        if result.victim is not None:
            assert result.victim is not oldest and result.victim.decoding and not blocks

    @rule(sequence=sequences, holder=st.sampled_from(("d1", "d2")))
    def adopt(self, sequence: Sequence, holder: str) -> None:
        home, before = self.node.of(sequence.lease), self.state()
        try:
            adopted = self.node.adopt(sequence.lease, holder, home.pool)
        except KvrelayError:
            assert self.state() == before
            return
        assert isinstance(adopted, LeaseRecord) and adopted.holder == holder and adopted.decoding
        sequence.holder = holder

    @rule(target=copies, sequence=sequences, pool=POOLS)
    def move(self, sequence: Sequence, pool: str) -> Any:
        before = self.state()
        try:
            move = self.node.adopt(sequence.lease, "d2", pool)
        except KvrelayError:
            assert self.state() == before
            return multiple()
        if isinstance(move, LeaseRecord):
            sequence.holder = "d2"
            return multiple()
        present = len(move.record.pages) - len(move.transfer.source_hold.pages)
        self.note(move.target, move.record.pages[present:])
        self.begin(move.transfer, move.record.pages[present:])
        move.waiting = 1
        return move

    @rule(sequence=sequences)
    def release(self, sequence: Sequence) -> None:
        self.node.release(sequence.holder, [sequence.lease])

    @rule(sequence=sequences)
    def renew(self, sequence: Sequence) -> None:
        lost = self.node.renew(sequence.holder, [sequence.lease])
        for writer in self.writers.values():
            if isinstance(writer, Straggler) and writer.holder == sequence.holder:
                writer.until_s = min(writer.until_s, self.clock.now + LEASE_S)
        record = self.node.of(sequence.lease, sequence.holder).leases.get(sequence.lease)
        assert bool(lost) == (record is None or record.holder != sequence.holder)

    @rule(pool=POOLS, text=TEXTS, ttl=st.sampled_from([0, 5, 500]))
    def pin(self, pool: str, text: str, ttl: float) -> None:
        ledger = self.node.ledger(pool)
        assert ledger.pin(chain(text), ttl) <= len(text)
        assert 2 * ledger.pages.pinned <= ledger.pages.total

    # --- copies ------------------------------------------------------------------------------------------------------

    def land(self, transfer: Transfer) -> None:
        """The mover has written: the source's content is now in the target."""
        for source, target in zip(transfer.source_hold.pages, transfer.target_hold.pages, strict=True):
            self.content[transfer.target.pool, target] = self.content[transfer.source.pool, source]

    def ended(self, transfer: Transfer) -> None:
        self.writers = {where: writer for where, writer in self.writers.items() if writer is not transfer}

    @rule(target=sequences, copy=consumes(copies), outcome=OUTCOMES)
    def finish_copy(self, copy: Grant | Move, outcome: str) -> Any:
        transfer, record = copy.transfer, copy.record
        assert transfer is not None
        if outcome in ("copied", "unwanted"):
            self.land(transfer)
            self.ended(transfer)
        if outcome == "failed":
            self.ended(transfer)
        if isinstance(copy, Grant):
            if outcome not in ("copied", "unwanted"):
                self.node.fail(copy.ledger, record, transfer, proven=outcome == "failed")
                return multiple()
            if not self.node.imported(copy):
                return multiple()
            return Sequence(record.lease, record.holder, "")
        if outcome == "unwanted":
            copy.waiting = 0
        if outcome in ("failed", "unproven"):
            self.node.unmoved(copy, proven=outcome == "failed")
            return multiple()
        try:
            moved = self.node.moved(copy)
        except Stale:
            return multiple()
        assert moved.lease not in copy.source.leases
        return Sequence(moved.lease, moved.holder, "")

    @rule()
    def settle_unproven(self) -> None:
        for transfer in self.node.transfers.unproven():
            for block in transfer.target_hold.pages:
                assert transfer.target.pages.state[block] == State.QUARANTINED
            self.ended(transfer)
            assert self.node.transfers.done(transfer.transfer)
            assert not self.node.transfers.done(transfer.transfer)  # a late, second ending

    # --- time and death ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, LEASE_S, FENCE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        for where in [where for where, writer in self.writers.items() if self.stopped(writer)]:
            del self.writers[where]
        for ledger in self.node.ledgers.values():
            for record in ledger.leases.values():
                if record.deadline_s <= self.clock.now:
                    self.linger(ledger, record)
            ledger.expire()
            assert all(record.deadline_s > self.clock.now for record in ledger.leases.values())

    def linger(self, ledger: Ledger, record: LeaseRecord) -> None:
        """The holder has not noticed yet that its lease runs out now, and goes on writing."""
        for block in record.pages:
            where = (ledger.pool, block)
            if ledger.pages.state[block] == State.FILLING and where not in self.writers:
                self.writers[where] = Straggler(record.holder, self.clock.now + FENCE_S)

    def stopped(self, writer: object) -> bool:
        return isinstance(writer, Straggler) and writer.until_s <= self.clock.now

    @rule(holder=st.sampled_from(HOLDERS))
    def die(self, holder: str) -> None:
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
            self.die(holder)
        self.clock.now += 1000
        for ledger in self.node.ledgers.values():
            ledger.expire()
            pages = ledger.pages
            assert pages.free + pages.cached == pages.total and ledger.tails.free == ledger.tails.total
            assert not ledger.leases and not list(ledger.holds) and pages.pinned == 0
        assert self.node.check() == []


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
