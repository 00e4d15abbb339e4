"""The states of a pool's pages, and every transition between them.

    FREE ──take──▶ FILLING ──seal──▶ SEALED ──drop to 0 refs──▶ cached ──evict──▶ FREE
                      │ drop to 0 refs ▶ FREE      ▲──── hold ────┘
                      └ quarantine ▶ QUARANTINED ──lift──▶ FREE (or FILLING, while still referenced)

`take` raises the generation of every page before it returns, so no handle of an earlier tenancy can pass a check.
A page has a key exactly while it is SEALED. Cached pages are in the eviction policy unless pinned. Every reference
belongs to an entry of a lease's table or to a transfer; the caller keeps those, `refs` only counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from services.block_manager.eviction.base import EvictionPolicy
from services.block_manager.index import PrefixIndex
from services.block_manager.runs import FreeRuns


class State(IntEnum):
    FREE = 0
    FILLING = 1
    SEALED = 2
    QUARANTINED = 3


FREE, FILLING, SEALED, QUARANTINED = map(int, State)


class Pages:
    """`generations` is the pool's shared array; only the entries of pages are touched here."""

    def __init__(self, blocks: int, generations: np.ndarray, policy: EvictionPolicy) -> None:
        self.total = blocks
        self.generations = generations
        self.state = bytearray(blocks)
        self.refs = [0] * blocks
        self.keys: list[bytes | None] = [None] * blocks
        self.index = PrefixIndex()
        self.evictions = 0
        self._free = FreeRuns(blocks)
        self._policy = policy
        self._pins: dict[int, float] = {}
        self._idle_pins = 0  # pinned and without references: cached, but not evictable
        self._fences: dict[int, int] = {}
        self._sealed = self._filling = 0

    # --- counts; free + filling + active + cached + quarantined == total --------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def filling(self) -> int:
        return self._filling

    @property
    def cached(self) -> int:
        return len(self._policy) + self._idle_pins

    @property
    def active(self) -> int:
        return self._sealed - self.cached

    @property
    def quarantined(self) -> int:
        return len(self._fences)

    @property
    def pinned(self) -> int:
        return len(self._pins)

    @property
    def available(self) -> int:
        """Pages that can be granted now without breaking a pin."""
        return len(self._free) + len(self._policy)

    @property
    def idle_pins(self) -> int:
        """Pages that only a pin keeps from being evicted."""
        return self._idle_pins

    def idle(self, blocks: list[int]) -> tuple[int, int]:
        """How many of these SEALED pages are evictable, and how many only pinned: what holding them would use up."""
        refs, pins = self.refs, self._pins
        unused = [block for block in blocks if not refs[block]]
        pinned = sum(block in pins for block in unused) if pins else 0
        return len(unused) - pinned, pinned

    # --- transitions -------------------------------------------------------------------------------------------------

    def take(self, count: int, near: int | None = None) -> list[int]:
        """FREE → FILLING with one reference, for `count` pages, evicting as needed; near `near` if possible.

        Breaks pins only when there is nothing else; the caller decides whether it may come to that.
        """
        while len(self._free) < count:
            self._evict(self._policy.pop() if len(self._policy) else self._break_pin())
        blocks = self._free.take(count, near)
        state, refs = self.state, self.refs
        for block in blocks:
            state[block] = FILLING
            refs[block] = 1
        self._filling += count
        self.generations[blocks] += 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these pages."""
        state, refs, pins, policy = self.state, self.refs, self._pins, self._policy
        for block in blocks:
            if not refs[block] and state[block] == SEALED:
                if block in pins:
                    self._idle_pins -= 1
                else:
                    policy.remove(block)
            refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One reference less; in the order in which they should be evicted (the tail of a sequence first)."""
        state, refs, pins, policy = self.state, self.refs, self._pins, self._policy
        for block in blocks:
            left = refs[block] - 1
            if left < 0:
                raise ValueError(f"page {block} is not referenced")
            refs[block] = left
            if left:
                continue
            if state[block] == SEALED:
                if block in pins:
                    self._idle_pins += 1
                else:
                    policy.add(block)
            elif state[block] == FILLING:
                self._filling -= 1
                self._release(block)

    def seal(self, block: int, key: bytes) -> None:
        """FILLING → SEALED: its bytes are final, and others may find it under `key` from now on."""
        if self.state[block] != FILLING:
            raise ValueError(f"page {block} is {State(self.state[block]).name}, not FILLING")
        self.state[block] = SEALED
        self.keys[block] = key
        self.index.add(key, block)
        self._filling -= 1
        self._sealed += 1

    def quarantine(self, block: int) -> None:
        """FILLING → QUARANTINED: somebody may still be writing into it. Counts; each call needs its own `lift`."""
        if block not in self._fences:
            if self.state[block] != FILLING:
                raise ValueError(f"page {block} is {State(self.state[block]).name}, not FILLING")
            self.state[block] = QUARANTINED
            self._filling -= 1
        self._fences[block] = self._fences.get(block, 0) + 1

    def lift(self, block: int) -> None:
        """The writer is proven gone: QUARANTINED → FREE, or FILLING while the page is still referenced."""
        self._fences[block] -= 1
        if self._fences[block]:
            return
        del self._fences[block]
        if self.refs[block]:
            self.state[block] = FILLING
            self._filling += 1
        else:
            self._release(block)

    def pin_keys(self, keys: list[bytes], until_s: float) -> int:
        """Keeps one page of each of these keys from eviction until `until_s`, or later if it is pinned longer already.

        At most half of the pool can be pinned, so that pins cannot bring it to a halt. Returns how many keys are.
        """
        pinned = 0
        for key in keys:
            blocks = self.index.blocks(key)
            block = next((block for block in blocks if block in self._pins), blocks[0] if blocks else None)
            if block is None:
                continue
            if block not in self._pins:
                if 2 * (len(self._pins) + 1) > self.total:
                    continue
                if not self.refs[block]:
                    self._policy.remove(block)
                    self._idle_pins += 1
            self._pins[block] = max(until_s, self._pins.get(block, until_s))
            pinned += 1
        return pinned

    def unpin_keys(self, keys: list[bytes]) -> None:
        for key in keys:
            for block in self.index.blocks(key):
                self._unpin(block)

    def expire_pins(self, now_s: float) -> None:
        for block in [block for block, until_s in self._pins.items() if until_s <= now_s]:
            self._unpin(block)

    def _unpin(self, block: int) -> None:
        if self._pins.pop(block, None) is not None and not self.refs[block]:
            self._idle_pins -= 1
            self._policy.add(block)

    def _break_pin(self) -> int:
        for block in self._pins:
            if not self.refs[block]:
                del self._pins[block]
                self._idle_pins -= 1
                return block
        raise LookupError("no page can be evicted")

    def _evict(self, block: int) -> None:
        key = self.keys[block]
        assert key is not None, "only sealed pages are evictable"
        self.index.remove(key, block)
        self.keys[block] = None
        self._sealed -= 1
        self.evictions += 1
        self._release(block)

    def _release(self, block: int) -> None:
        self.state[block] = FREE
        self._free.add(block)

    # --- self-check --------------------------------------------------------------------------------------------------

    def audit(self, entries: int) -> list[str]:
        """Cheap checks; `entries` is how many references leases and transfers hold in all."""
        counted = self.free + self.filling + self.active + self.cached + self.quarantined
        count = self.state.count
        rules = {
            "free + filling + active + cached + quarantined == total": counted == self.total,
            "counts equal states": (self.free, self.filling, self.active + self.cached, self.quarantined)
            == tuple(count(state) for state in (FREE, FILLING, SEALED, QUARANTINED)),
            "the sum of references equals the sum of table entries": sum(self.refs) == entries,
        }
        return [rule for rule, holds in rules.items() if not holds]

    def check(self, references: np.ndarray) -> list[str]:
        """Everything that is wrong with these books; `references` counts, per page, what leases and transfers hold."""
        states = np.frombuffer(self.state, dtype=np.uint8)
        refs = np.asarray(self.refs)
        keyed = np.fromiter((key is not None for key in self.keys), dtype=bool, count=self.total)
        free = np.zeros(self.total, dtype=bool)
        for start, length in self._free.runs().items():
            free[start : start + length] = True
        evictable = np.zeros(self.total, dtype=bool)
        evictable[list(self._policy)] = True
        pinned = np.zeros(self.total, dtype=bool)
        pinned[list(self._pins)] = True
        indexed = [(block, key) for key in set(filter(None, self.keys)) for block in self.index.blocks(key)]
        sealed, fenced = np.flatnonzero(states == SEALED).tolist(), np.flatnonzero(states == QUARANTINED).tolist()
        counted = self.free + self.filling + self.active + self.cached + self.quarantined
        rules = {
            "free + filling + active + cached + quarantined == total": counted == self.total,
            "references equal what leases and transfers hold": np.array_equal(refs, references),
            "the free list holds exactly the FREE pages": np.array_equal(free, states == FREE),
            "FREE pages have no references": not refs[states == FREE].any(),
            "FILLING pages have references": bool(refs[states == FILLING].all()),
            "exactly the SEALED pages have a key": np.array_equal(keyed, states == SEALED),
            "exactly the idle, unpinned SEALED pages are evictable": np.array_equal(
                evictable, (states == SEALED) & (refs == 0) & ~pinned
            ),
            "pinned pages are SEALED": bool((states[pinned] == SEALED).all()),
            "idle pins are counted": self._idle_pins == int((pinned & (refs == 0)).sum()),
            "filling is counted": self._filling == int((states == FILLING).sum()),
            "sealed is counted": self._sealed == int((states == SEALED).sum()),
            "fences are the QUARANTINED pages": sorted(self._fences) == fenced,
            "the index holds exactly the SEALED pages": sorted(block for block, _ in indexed) == sealed,
            "each key leads to its own pages": all(self.keys[block] == key for block, key in indexed),
        }
        return [rule for rule, holds in rules.items() if not holds]
