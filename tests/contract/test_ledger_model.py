"""The ledgers of a node under random operations, against memory that tells what was really written where.

The model keeps, for every page of two pools, the content a writer last put there. Whatever happens: the books are
right after every step, a hit holds exactly the content its key stands for, no two tenancies share a handle, nobody but
its holder can be writing to a page that is granted, and in the end every page and tail comes back.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, rule

from services.block_manager.holds import FENCE_S
from services.block_manager.leases import LeaseRecord
from services.block_manager.ledger import LEASE_S
from services.block_manager.node import Grant, Move
from services.block_manager.pages import State
from shared.errors import BadRequest, Busy, Conflict, KvrelayError, Stale, TooLarge
from shared.messages import Acquire
from tests.support.ledger_model import HOLDERS, LedgerModel, Sequence, Straggler
from tests.support.ledgers import BLOCK, chain

POOLS = st.sampled_from("ab")
OUTCOMES = st.sampled_from(["copied", "unwanted", "failed", "unproven"])
TEXTS = st.sampled_from(["", "x", "xy", "xyz", "xyzx", "xyzxy", "y", "yy"])


class LedgerMachine(LedgerModel):
    sequences: Bundle[Sequence] = Bundle("sequences")
    copies: Bundle[Any] = Bundle("copies")

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
        self.note_tail(record, ledger)
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
        self.note_tail(move.record, move.target)
        self.begin(move.transfer, move.record.pages[present:])
        move.waiting = 1
        return move

    @rule(sequence=sequences, start=st.integers(0, 12), other=st.sampled_from(HOLDERS))
    def mislead(self, sequence: Sequence, start: int, other: str) -> None:
        """Wrong keys, pages beyond the end, and messages about somebody else's lease: refused, and nothing changes."""
        ledger = self.node.of(sequence.lease, sequence.holder)
        record, before = ledger.leases.get(sequence.lease), self.state()
        if record is not None and record.holder == sequence.holder:
            beyond = start >= len(record.pages)
            if beyond or ledger.pages.state[record.pages[start]] == State.SEALED:
                with pytest.raises(BadRequest if beyond else Conflict):
                    ledger.commit(sequence.holder, sequence.lease, start, [b"another content"])
        if record is None or record.holder != other:
            held = self.node.of(sequence.lease, other).leases.get(sequence.lease)
            if held is None or held.holder != other:  # not even in another pool, where it may be moving to
                self.node.release(other, [sequence.lease])
                assert not self.node.of(sequence.lease, other).commit(other, sequence.lease, 0, [b"stolen"])
                assert self.node.extend(other, [(sequence.lease, 1)])[1].lost == [sequence.lease]
        assert self.state() == before

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

    @rule(holder=st.sampled_from(HOLDERS))
    def die(self, holder: str) -> None:
        self.gone(holder)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
