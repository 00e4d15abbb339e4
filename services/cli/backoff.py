"""When to start a process again that ended: at once the first time, then ever later, forgiven after a quiet while."""

from __future__ import annotations

FIRST_S = 0.25
LONGEST_S = 15.0
FORGIVEN_AFTER_S = 30.0


class Backoff:
    """Delays 0, ¼, ½, 1, 2, 4, 8, 15, 15, … seconds; starts over once the process has lived `FORGIVEN_AFTER_S`."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def next_delay(self, lived_s: float) -> float:
        """Seconds to wait before the next start of a process that lived `lived_s` seconds."""
        if lived_s >= FORGIVEN_AFTER_S:
            self._in_a_row = 0
        delay = 0.0 if self._in_a_row == 0 else min(FIRST_S * 2 ** (self._in_a_row - 1), LONGEST_S)
        self._in_a_row += 1
        return delay
