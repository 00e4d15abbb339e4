"""All pools of a node as one: leases are found wherever they are, and a hit in another pool is a copy away. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.block_manager.leases import Extension, LeaseRecord
from services.block_manager.ledger import Ledger
from services.block_manager.transfers import Transfer, Transfers
from shared.errors import BadRequest, Conflict, NotFound, Stale
from shared.messages import Acquire
from shared.prefix import split_keys


@dataclass(slots=True)
class Move:
    """A lease on its way into another pool: `record` there already holds everything, `origin` is still in force."""

    origin: LeaseRecord
    source: Ledger
    record: LeaseRecord
    target: Ledger
    transfer: Transfer
    first: int
    waiting: int = 0  # callers that still want it


@dataclass(slots=True)
class Grant:
    """A lease just acquired, and the transfer that will bring more of its prompt in from another pool, if any."""

    ledger: Ledger
    record: LeaseRecord
    transfer: Transfer | None = None
    first: int = 0


def named(keys: bytes) -> list[bytes]:
    """The keys of a message one by one. Raises BadRequest if their length is not a multiple of 16."""
    try:
        return split_keys(keys)
    except ValueError as error:
        raise BadRequest(str(error)) from None


class Node:
    """The ledgers by pool name; they share one source of lease ids and one page layout."""

    def __init__(self, ledgers: Iterable[Ledger], ids: Iterator[int]) -> None:
        self.ledgers = {ledger.pool: ledger for ledger in ledgers}
        self.transfers = Transfers(ids)
        self.moving: dict[int, Move] = {}

    def ledger(self, pool: str) -> Ledger:
        """Raises NotFound for a pool that is not on this node."""
        try:
            return self.ledgers[pool]
        except KeyError:
            raise NotFound(f"no pool {pool!r} here; there are: {', '.join(self.ledgers)}") from None

    def of(self, lease: int, holder: str | None = None) -> Ledger:
        """Where a lease is (as `holder`'s, if one is named); the first pool, which will not know it, if nowhere."""
        found = [ledger for ledger in self.ledgers.values() if lease in ledger.leases]
        for ledger in found:
            if holder is None or ledger.leases[lease].holder == holder:
                return ledger
        return found[0] if found else next(iter(self.ledgers.values()))

    # --- acquire -----------------------------------------------------------------------------------------------------

    def awaited(self, pool: str, keys: list[bytes], tokens: int) -> Transfer | None:
        """The transfer that is already bringing the first missing page of this prompt into `pool`: wait for it."""
        ledger = self.ledger(pool)
        missing = len(ledger.match(keys, tokens))
        if missing < min(len(keys), (tokens - 1) // ledger.block_size):
            return self.transfers.copying(pool, keys[missing])
        return None

    def acquire(self, message: Acquire, *, imports: bool) -> Grant:
        """A lease; with `imports`, also the transfer of pages that only another pool has. Busy, TooLarge, NotFound."""
        ledger = self.ledger(message.pool)
        keys = named(message.keys)
        record = ledger.acquire(
            message.holder,
            message.request_id,
            keys,
            message.tokens,
            priority=message.priority,
            arrival_s=message.arrival_s,
        )
        grant = Grant(ledger, record, None, record.cached_tokens // ledger.block_size)
        if imports:
            wanted = keys[grant.first : (message.tokens - 1) // ledger.block_size]
            others = [other for other in self.ledgers.values() if other is not ledger]
            found = [(other.pages.index.match(wanted), other) for other in others]
            pages, source = max(found, key=lambda one: len(one[0]), default=([], ledger))
            if pages:
                targets = record.pages[grant.first : grant.first + len(pages)]
                grant.transfer = self.transfers.begin(source, pages, ledger, targets, wanted[: len(pages)])
        return grant

    def imported(self, grant: Grant) -> bool:
        """The copy is verified: its pages are hits like any other. False if the lease ended meanwhile."""
        transfer, record = grant.transfer, grant.record
        assert transfer is not None
        self.transfers.done(transfer.transfer)
        if grant.ledger.leases.get(record.lease) is not record:
            return False
        grant.ledger.commit(record.holder, record.lease, grant.first, transfer.keys)
        record.cached_tokens += len(transfer.keys) * grant.ledger.block_size
        return True

    def fail(self, ledger: Ledger, record: LeaseRecord, transfer: Transfer, *, proven: bool) -> None:
        """The copy for `record` failed: its lease in `ledger` ends; the targets are quarantined unless `proven`."""
        if proven:
            self.transfers.done(transfer.transfer)
        else:
            self.transfers.abandon(transfer.transfer)
        if ledger.leases.get(record.lease) is record:
            ledger.end(record)

    # --- adopt -------------------------------------------------------------------------------------------------------

    def awaited_by_move(self, lease: int, pool: str) -> Transfer | None:
        """The transfer that is already bringing the first page this lease lacks in `pool`: wait for it."""
        source = self.of(lease)
        if lease not in source.leases or source.pool == pool:
            return None
        keys = source.keys_of(source.leases[lease])
        missing = len(self.ledger(pool).pages.index.match(keys))
        return self.transfers.copying(pool, keys[missing]) if missing < len(keys) else None

    def adopt(self, lease: int, holder: str, pool: str) -> LeaseRecord | Move:
        """The lease as `holder`'s if it is in `pool` already, else the move that has to be made first.

        Stale (unknown lease), Conflict (another holder was faster), Busy and TooLarge (no room in `pool`).
        """
        target = self.ledger(pool)
        if lease in self.moving:
            raise Conflict(f"lease {lease} is being adopted already")
        source = self.of(lease)
        record = source.leases.get(lease)
        if record is None or source is target or record.decoding:
            return source.adopt(lease, holder)
        keys = source.keys_of(record)
        moved, present = target.receive(record, holder, keys)
        transfer = self.transfers.begin(
            source,
            record.pages[present:],
            target,
            moved.pages[present:],
            keys[present:],
            (record.tail, moved.tail),
        )
        move = self.moving[lease] = Move(record, source, moved, target, transfer, present)
        return move

    def moved(self, move: Move) -> LeaseRecord:
        """The copy is verified: the lease lives in its new pool. If that is not wanted any more (nobody waits, or the
        lease ended on one side meanwhile), it stays as it is and Stale is raised."""
        record, target, source = move.record, move.target, move.source
        alive = source.leases.get(record.lease) is move.origin and target.leases.get(record.lease) is record
        if not alive or not move.waiting:
            self.unmoved(move, proven=True)
            raise Stale(f"lease {record.lease} ended while its pages were being copied; recompute")
        del self.moving[record.lease]
        self.transfers.done(move.transfer.transfer)
        target.commit(record.holder, record.lease, move.first, move.transfer.keys)
        target.renew(record.holder, [record.lease])
        source.end(move.origin)
        return record

    def unmoved(self, move: Move, *, proven: bool) -> None:
        """The copy failed: the lease stays where and whose it was."""
        del self.moving[move.record.lease]
        self.fail(move.target, move.record, move.transfer, proven=proven)

    # --- batches -----------------------------------------------------------------------------------------------------

    def extend(self, holder: str, items: list[tuple[int, int]]) -> tuple[list[tuple[Ledger, list[int]]], Extension]:
        """Pages per item with the ledger they are of; and the answers of all ledgers, merged."""
        merged = Extension()
        granted: list[tuple[Ledger, list[int]]] = []
        for lease, pages in items:
            ledger = self.of(lease, holder)
            one = ledger.extend(holder, [(lease, pages)])
            granted.append((ledger, one.granted[0]))
            merged.victim = merged.victim or one.victim
            merged.lost += one.lost
        return granted, merged

    def renew(self, holder: str, leases: list[int]) -> list[int]:
        """Renews each lease where it is; returns those that are not `holder`'s."""
        by_pool: dict[str, list[int]] = {pool: [] for pool in self.ledgers}
        for lease in leases:
            by_pool[self.of(lease, holder).pool].append(lease)
        return [lost for pool, some in by_pool.items() for lost in self.ledgers[pool].renew(holder, some)]

    def release(self, holder: str, leases: list[int]) -> None:
        for lease in leases:
            self.of(lease, holder).release(holder, [lease])

    def victims(self) -> list[LeaseRecord]:
        """The sequences that have been asked to go and are still there."""
        return [record for ledger in self.ledgers.values() for record in ledger.leases.values() if record.preempting]

    def audit(self) -> list[str]:
        """The part of `check` that is cheap enough for a running node."""
        return [f"{pool}: {problem}" for pool, ledger in self.ledgers.items() for problem in ledger.audit()]

    def check(self) -> list[str]:
        """What is wrong in any pool; empty when all books are right."""
        return [f"{pool}: {problem}" for pool, ledger in self.ledgers.items() for problem in ledger.check()]
