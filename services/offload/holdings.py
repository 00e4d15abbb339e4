"""The pools that are open, and when to let go of them. Used by the event loop and by other threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from services.offload.tiers.base import PoolTier


class Holdings:
    """One tier for each pool. One that is replaced or dropped is closed when the last copy that uses it is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, PoolTier] = {}
        self._users: Counter[PoolTier] = Counter()

    @property
    def tiers(self) -> list[PoolTier]:
        with self._lock:
            return list(self._open.values())

    def has(self, pool: str) -> bool:
        """Whether `pool` is open, in an incarnation that is not over."""
        found = self._open.get(pool)
        return found is not None and not found.ended

    def put(self, pool: str, tier: PoolTier) -> None:
        """Instead of the one that was here."""
        with self._lock:
            old = self._open.get(pool)
            self._open[pool] = tier
        self._close_unused([] if old is None else [old])

    def hold(self, pool: str, epoch: int) -> PoolTier | None:
        """The tier of this incarnation, kept open until `release`; None if it is not open."""
        with self._lock:
            found = self._open.get(pool)
            if found is None or found.epoch != epoch:
                return None
            self._users[found] += 1
            return found

    def release(self, held: Iterable[PoolTier]) -> None:
        """Each one that was held, once."""
        used = list(held)
        with self._lock:
            self._users.subtract(used)
            kept = list(self._open.values())
        self._close_unused([tier for tier in used if tier not in kept])

    def drop_ended(self) -> None:
        """Lets go of incarnations that are over."""
        with self._lock:
            dropped = [self._open.pop(pool) for pool, tier in list(self._open.items()) if tier.ended]
        self._close_unused(dropped)

    def close(self) -> None:
        """Drops everything."""
        with self._lock:
            dropped, self._open = list(self._open.values()), {}
        self._close_unused(dropped)

    def _close_unused(self, dropped: list[PoolTier]) -> None:
        with self._lock:
            unused = {tier for tier in dropped if not self._users[tier]}
            for tier in unused:
                del self._users[tier]
        for tier in unused:
            tier.close()
