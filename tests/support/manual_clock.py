"""A clock that stands still until the test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """`advance` wakes the sleepers that are due, in order of their time, and lets each run before the next."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, wake = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            if not wake.done():
                wake.set_result(None)
            await settle()
        self._now = end
        await settle()


async def settle(rounds: int = 20) -> None:
    """Lets everything that can run without time passing run."""
    for _ in range(rounds):
        await asyncio.sleep(0)
