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
DOUBT_S = 3.0
DOUBT_ROUNDS = 5
"""So many answered renewals, so far apart, outlast a lease that was granted just before the first of them."""


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
        self._doubts = 0
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

    def doubt(self) -> None:
        """A lease may have been granted that we never heard of.

        For a while we renew even if nothing is held: from whoever renews after a lease has run out, the manager knows
        that it will soon not write under it. Else it keeps those pages back for a minute.
        """
        self._doubts = DOUBT_ROUNDS
        self._added.set()

    def safe(self) -> bool:
        """Whether every lease is surely still ours."""
        return self._now() < self.fence

    async def run(self) -> None:
        """The renewal loop; sleeps without a timer while there is nothing to renew."""
        while True:
            while not self._until and not self._doubts:
                self._added.clear()
                await self._added.wait()
            third = min(self._terms.values()) / 3 if self._terms else DOUBT_S
            await asyncio.sleep(min(RETRY_S, third) if self._unanswered else third)
            if (self._until or self._doubts) and await self.renew():
                self._doubts = max(0, self._doubts - 1)

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
