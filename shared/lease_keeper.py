"""Keeps the leases of one holder alive with one batched message, and knows until when they surely are.

The fence: a lease is certainly ours until `deadline_s` after the moment its last successful renewal was *sent*. Whoever
writes into pages checks the fence first, so a process that was stopped for a while, or cut off from the block manager,
stops writing before its pages can have another tenant.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from shared import logs
from shared.bus import Bus
from shared.errors import KvrelayError
from shared.messages import Renew, Renewed

log = logs.get()

RETRY_S = 0.5
SAFETY = 0.9


class LeaseKeeper:
    """`on_lost(leases)` is told which leases no longer exist; `on_renewed()` that the fence has moved."""

    def __init__(
        self,
        bus: Bus,
        holder: str,
        on_lost: Callable[[list[int]], None],
        on_renewed: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._holder = holder
        self._on_lost = on_lost
        self._on_renewed = on_renewed
        self._now = now
        self._until: dict[int, float] = {}
        self._terms: dict[int, float] = {}
        self._added = asyncio.Event()
        self._unanswered = False
        self.fence = math.inf

    def __len__(self) -> int:
        return len(self._until)

    def add(self, lease: int, deadline_s: float, granted_at: float) -> None:
        """Keeps `lease` from now on. `granted_at` is when the request for it was sent, which is the safe side."""
        self._terms[lease] = deadline_s
        self._until[lease] = granted_at + SAFETY * deadline_s
        self._refence()
        self._added.set()

    def drop(self, lease: int) -> None:
        """Stops renewing; harmless for unknown leases."""
        if self._until.pop(lease, None) is not None:
            del self._terms[lease]
            self._refence()

    def safe(self) -> bool:
        """Whether every lease is surely still ours."""
        return self._now() < self.fence

    async def run(self) -> None:
        """The renewal loop; sleeps without a timer while there is nothing to renew."""
        while True:
            while not self._until:
                self._added.clear()
                await self._added.wait()
            third = min(self._terms.values()) / 3
            await asyncio.sleep(min(RETRY_S, third) if self._unanswered else third)
            if self._until:
                await self.renew()

    async def renew(self) -> bool:
        """One renewal of everything held; False if the block manager did not answer."""
        leases, sent = list(self._until), self._now()
        try:
            message = Renew(holder=self._holder, leases=leases)
            renewed = await self._bus.request("block_manager.renew", message, Renewed, timeout_s=2.0)
        except KvrelayError as error:
            log.warning("leases not renewed", holder=self._holder, leases=len(leases), error=error.text)
            self._unanswered = True
            return False
        self._unanswered = False
        lost = [lease for lease in renewed.lost if lease in self._until]
        for lease in lost:
            self.drop(lease)
        for lease in leases:
            if lease in self._until:
                self._until[lease] = max(self._until[lease], sent + SAFETY * self._terms[lease])
        self._refence()
        if lost:
            self._on_lost(lost)
        self._on_renewed()
        return True

    def _refence(self) -> None:
        self.fence = min(self._until.values(), default=math.inf)
