"""Time as a parameter, so that tests can move it. Seconds everywhere."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What leases, heartbeats and back-off read. Never compare `wall` readings of two machines for order."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; only differences mean something."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for people and for ordering arrivals."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns `seconds` later."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM = SystemClock()
