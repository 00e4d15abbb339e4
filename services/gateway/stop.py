"""Stop strings in a stream of text deltas. Pure.

The answer ends at the first character position at which some stop string is a suffix of the text so far; of several
that end there the longest wins. The definition speaks of characters, so how the text was cut into deltas cannot matter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopStrings:
    """Lets text through, except what could still become a stop string; that much is held back."""

    stops: tuple[str, ...]
    held: str = ""

    def __post_init__(self) -> None:
        if any(not stop for stop in self.stops):
            raise ValueError("a stop string must not be empty")

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Returns the text that is certain to be part of the answer, and the stop string that ended it, if one did."""
        if not self.stops:
            return delta, None
        window = self.held + delta
        found = self._find(window)
        if found is not None:
            start, stop = found
            self.held = ""
            return window[:start], stop
        keep = self._holdback(window)
        cut = len(window) - keep
        self.held = window[cut:]
        return window[:cut], None

    def flush(self) -> str:
        """The near-miss that the end of the text turned into ordinary text."""
        held, self.held = self.held, ""
        return held

    def _find(self, window: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = window.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and best[1:]

    def _holdback(self, window: str) -> int:
        """Length of the longest suffix of `window` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self.stops:
            start = window.find(stop[0], max(0, len(window) - len(stop) + 1))
            while 0 <= start < len(window) - longest:
                if stop.startswith(window[start:]):
                    longest = len(window) - start
                    break
                start = window.find(stop[0], start + 1)
        return longest
