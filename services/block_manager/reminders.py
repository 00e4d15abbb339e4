"""When to ask a sequence again to give its pages back. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

AGAIN_S: Final = 1.0


class Reminders:
    """A victim that is still there keeps everybody out, and the message to it may have been lost: it is asked until it
    is gone, but not with every refusal. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: dict[int, float] = {}

    def due(self, lease: int) -> bool:
        """Whether to ask now; the answer yes is noted."""
        now = self._clock()
        self._asked = {asked: at for asked, at in self._asked.items() if now - at < AGAIN_S}
        if lease in self._asked:
            return False
        self._asked[lease] = now
        return True
