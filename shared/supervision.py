"""Restarting what fails, up to an intensity: more than `max_restarts` within `window_s` is given up as hopeless.

A background loop is made anew by its factory each time, so that no broken state survives. When a loop is given up, the
process ends with code 1 and whoever started the process decides about it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from shared import logs
from shared.clock import Clock

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

log = logs.get()


class Intensity:
    """Counts restarts in a sliding window."""

    def __init__(self, max_restarts: int = 5, window_s: float = 30.0) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._restarts: deque[float] = deque()

    def restart(self, now: float) -> float | None:
        """Notes one restart at `now`: the seconds to wait before it, growing with each; None: no more, give up."""
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        self._restarts.append(now)
        if len(self._restarts) > self.max_restarts:
            return None
        return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (len(self._restarts) - 1)))


async def supervise(
    name: str, factory: Callable[[], Coroutine[Any, Any, None]], clock: Clock, intensity: Intensity | None = None
) -> None:
    """Runs `factory()` until it returns; runs it again when it raises. Raises its last error at the intensity's end."""
    intensity = intensity or Intensity()
    while True:
        try:
            # a context of its own: the loop is nobody's child
            await asyncio.get_running_loop().create_task(factory(), name=name, context=contextvars.Context())
            return
        except Exception as error:
            wait_s = intensity.restart(clock.monotonic())
            if wait_s is None:
                log.error("background loop given up", loop=name, restarts=intensity.max_restarts, exc_info=error)
                raise
            log.warning("background loop failed; restarting", loop=name, wait_s=wait_s, exc_info=error)
            await clock.sleep(wait_s)
