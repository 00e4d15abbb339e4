"""The ledger of one pool: who holds which page, what is cached, who gets the next one. Pure and synchronous.

Rules (each has a test of its own in tests/unit/block_manager):

- A grant is all or nothing; a refused call changes nothing but the note that somebody waits for room.
- Admission keeps a reserve free for sequences that already decode: one page each, and 1 % of the pool (at least 2).
  It stands still while a preemption is under way. With nobody else in the pool the reserve does not apply, so a
  sequence of up to `max_model_len` tokens can always run, one at a time if need be.
- When an extension finds no room, the newest sequence of the least important priority is to be preempted; the most
  important one never is, so there is always progress. Pins yield only if there is nobody to preempt.
- A lease that runs out may have left a writer behind that is merely slow. Its unfinished pages and its tail stay
  quarantined until the holder is proven gone, or has heard of the loss and had one lease term to act on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Final

import numpy as np

from services.block_manager import eviction
from services.block_manager.hits import HitCounter
from services.block_manager.holds import Holds
from services.block_manager.leases import Extension, LeaseRecord, Leases
from services.block_manager.pages import SEALED, Pages
from services.block_manager.reserve import base_reserve, longest
from services.block_manager.tails import Tails
from shared.errors import BadRequest, Busy, Conflict, TooLarge
from shared.handles import BlockTable, TailHandle, pack_u32

LEASE_S: Final = 9.0
BUSY_RETRY_S: Final = 0.05


class Ledger:
    """`generations` is u32 [blocks + tails], shared with readers. `clock` is monotonic seconds. `ids` gives lease ids
    (shared by all pools of a node)."""

    def __init__(
        self,
        pool: str,
        epoch: int,
        blocks: int,
        tails: int,
        block_size: int,
        generations: np.ndarray,
        clock: Callable[[], float],
        *,
        max_model_len: int | None = None,
        lease_s: float = LEASE_S,
        ids: Iterator[int] | None = None,
        policy: str = "lru",
    ) -> None:
        self.pool, self.epoch, self.block_size, self.lease_s = pool, epoch, block_size, lease_s
        bound = longest(blocks, block_size)
        self.max_model_len = min(max_model_len or bound, bound)
        self.pages = Pages(blocks, generations[:blocks], eviction.create(policy, blocks))
        self.tails = Tails(tails, generations[blocks:])
        self.leases = Leases()
        self.holds = Holds(self.pages, self.tails)
        self.hits = HitCounter()
        self.expired_leases = 0
        self._clock = clock
        self._ids = ids or count(1)
        self._base_reserve = base_reserve(blocks)
        self._hungry: int | None = None

    # --- admission ---------------------------------------------------------------------------------------------------

    @property
    def reserve(self) -> int:
        """Pages that must stay available after an admission."""
        return self._base_reserve + sum(record.decoding for record in self.leases.values())

    def match(self, keys: list[bytes], tokens: int) -> list[int]:
        """Pages of the longest cached prefix of a prompt; at least one token is left to compute."""
        return self.pages.index.match(keys[: (tokens - 1) // self.block_size])

    def acquire(
        self,
        holder: str,
        request_id: str,
        keys: list[bytes],
        tokens: int,
        *,
        priority: int = 0,
        arrival_s: float = 0.0,
    ) -> LeaseRecord:
        """Hits, fresh pages for the rest of the prompt plus one page ahead, and a tail: all, or Busy or TooLarge."""
        if tokens > self.max_model_len:
            raise TooLarge(f"{tokens} tokens are too many: pool {self.pool} takes up to {self.max_model_len}")
        hits = self.match(keys, tokens)
        want = tokens // self.block_size + 1
        record = self._grant(next(self._ids), hits, want, holder, request_id, priority, arrival_s)
        record.cached_tokens = len(hits) * self.block_size
        return record

    def receive(self, origin: LeaseRecord, holder: str, keys: list[bytes]) -> tuple[LeaseRecord, int]:
        """The same sequence in this pool, under the same lease id, for `holder`, who will decode it.

        `keys` name its committed pages. Returns the lease and how many of its pages are here already. Busy, TooLarge.
        """
        if len(origin.pages) > self.pages.total - self._base_reserve + 1:
            raise TooLarge(f"{len(origin.pages)} pages do not fit into pool {self.pool}")
        hits = self.pages.index.match(keys)
        identity = (origin.request_id, origin.priority, origin.arrival_s)
        record = self._grant(origin.lease, hits, len(origin.pages), holder, *identity)
        record.cached_tokens, record.decoding = origin.cached_tokens, True
        return record, len(hits)

    def count(self, record: LeaseRecord, tokens: int) -> None:
        """Counts an admitted prompt of `tokens` and its hits."""
        self.hits.count(record.request_id, record.cached_tokens, tokens)

    def fed(self) -> bool:
        """True once after somebody was told Busy and what they needed would be admitted now."""
        if self._hungry is None or not self._admits(self._hungry, []):
            return False
        self._hungry = None
        return True

    def _admits(self, need: int, hits: list[int]) -> bool:
        if not self.tails.free:
            return False
        evictable, pinned = self.pages.idle(hits)
        left = self.pages.available - evictable - need
        if not self.leases:
            return left + self.pages.idle_pins - pinned >= 0
        return left >= self.reserve and not any(record.preempting for record in self.leases.values())

    def _grant(
        self,
        lease: int,
        hits: list[int],
        want: int,
        holder: str,
        request_id: str,
        priority: int,
        arrival_s: float,
    ) -> LeaseRecord:
        need = want - len(hits)
        if not self._admits(need, hits):
            self._hungry = need if self._hungry is None else min(need, self._hungry)
            raise Busy(f"pool {self.pool} has no room for {need} more pages now", retry_after_s=BUSY_RETRY_S)
        self.pages.hold(hits)
        blocks = hits + self.pages.take(need, near=hits[-1] + 1 if hits else None)
        deadline_s = self._clock() + self.lease_s
        record = LeaseRecord(
            lease, holder, request_id, priority, arrival_s, blocks, self.tails.take(), deadline_s=deadline_s
        )
        self.leases[lease] = record
        return record

    # --- running sequences -------------------------------------------------------------------------------------------

    def extend(self, holder: str, items: Iterable[tuple[int, int]]) -> Extension:
        """More pages, per (lease, pages) in order, each all or nothing."""
        result = Extension()
        for lease, pages in items:
            record = self.leases.held(lease, holder)
            if record is None:
                result.lost.append(lease)
                result.granted.append([])
                continue
            room = pages <= self.pages.available
            if not room:
                victim = self.leases.victim(self.pages.refs)
                result.victim = result.victim or victim
                room = victim is None and pages <= self.pages.available + self.pages.idle_pins
            blocks = self.pages.take(pages, near=record.pages[-1] + 1 if record.pages else None) if room else []
            record.pages += blocks
            result.granted.append(blocks)
        return result

    def commit(self, holder: str, lease: int, start: int, keys: list[bytes]) -> bool:
        """Publishes pages `start …` of the lease. False (and counted) if it is not `holder`'s lease any more.

        Committing a page again under the same key changes nothing; under another key it is a Conflict.
        """
        record = self.leases.held(lease, holder)
        if record is None:
            return False
        blocks = record.pages[start : start + len(keys)]
        if len(blocks) != len(keys):
            raise BadRequest(f"lease {lease} has {len(record.pages)} pages, not {start + len(keys)}")
        state, known = self.pages.state, self.pages.keys
        for block, key in zip(blocks, keys, strict=True):
            if state[block] == SEALED and known[block] != key:
                raise Conflict(f"a page of lease {lease} is committed under another key already")
        for block, key in zip(blocks, keys, strict=True):
            if state[block] != SEALED:
                self.pages.seal(block, key)
        return True

    def adopt(self, lease: int, holder: str) -> LeaseRecord:
        """See `Leases.adopt`."""
        return self.leases.adopt(lease, holder, self._clock() + self.lease_s)

    def renew(self, holder: str, leases: Iterable[int]) -> list[int]:
        """See `Leases.renew`. Whoever hears of a loss stops writing within one lease term."""
        deadline_s = self._clock() + self.lease_s
        lost = self.leases.renew(holder, leases, deadline_s)
        self.holds.warned(holder, deadline_s)
        return lost

    def release(self, holder: str, leases: Iterable[int]) -> None:
        """Gives everything under these leases back. Those that are not `holder`'s are ignored and counted."""
        for lease in leases:
            record = self.leases.held(lease, holder)
            if record is not None:
                self.end(record)

    def end(self, record: LeaseRecord) -> None:
        """Ends a lease whose holder writes no more; its pages are freed tail first."""
        del self.leases[record.lease]
        self.pages.drop(reversed(record.pages))
        self.tails.drop(record.tail)

    # --- time and death ----------------------------------------------------------------------------------------------

    def expire(self) -> list[LeaseRecord]:
        """Ends what has run out: leases (returned), fences, pins."""
        now = self._clock()
        ended = [record for record in self.leases.values() if record.deadline_s <= now]
        for record in ended:
            self.holds.fence(record, now)
            self.end(record)
            self.expired_leases += 1
        self.holds.expire(now)
        self.pages.expire_pins(now)
        return ended

    def pin(self, keys: list[bytes], ttl_s: float) -> int:
        """Keeps cached pages from eviction for `ttl_s` seconds (0 unpins); returns how many keys are pinned now."""
        if not ttl_s:
            self.pages.unpin_keys(keys)
            return 0
        return self.pages.pin_keys(keys, self._clock() + ttl_s)

    def holder_gone(self, holder: str) -> list[LeaseRecord]:
        """The process is proven dead: its leases and fences end at once. Returns the leases."""
        ended = [record for record in self.leases.values() if record.holder == holder]
        for record in ended:
            self.end(record)
            self.expired_leases += 1
        self.holds.gone(holder)
        return ended

    # --- views -------------------------------------------------------------------------------------------------------

    def table(self, blocks: list[int]) -> BlockTable:
        """Handles of these pages as they are now."""
        generations = self.pages.generations[blocks] if blocks else ()
        return BlockTable(pool=self.pool, epoch=self.epoch, indices=pack_u32(blocks), generations=pack_u32(generations))

    def tail_handle(self, slot: int) -> TailHandle:
        return TailHandle(slot=slot, generation=int(self.tails.generations[slot]))

    def keys_of(self, record: LeaseRecord) -> list[bytes]:
        """Keys of the leading committed pages of a lease."""
        keys = []
        for block in record.pages:
            key = self.pages.keys[block]
            if key is None:
                break
            keys.append(key)
        return keys

    def audit(self) -> list[str]:
        """The invariants that can be checked at any time: counts against states, references against table entries."""
        entries = sum(len(record.pages) for record in self.leases.values())
        entries += sum(len(hold.pages) for hold in self.holds if not hold.fenced)
        return self.pages.audit(entries)

    def check(self) -> list[str]:
        """Every invariant that does not hold; empty when the books are right. Linear in the pool's size."""
        references = np.zeros(self.pages.total, dtype=np.int64)
        holders = np.zeros(self.tails.total, dtype=np.int64)
        for record in self.leases.values():
            np.add.at(references, record.pages, 1)
            holders[record.tail] += 1
        for hold in self.holds:
            if not hold.fenced:
                np.add.at(references, hold.pages, 1)
            if hold.tail is not None:
                holders[hold.tail] += 1
        return self.pages.check(references) + self.tails.check(holders)
