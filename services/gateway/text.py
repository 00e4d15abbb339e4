"""From tokens to the text a client sees: incremental detokenising, then stop strings. Pure.

The sum of all pieces is the text of all tokens, cut at the stop string; no piece ends inside a character, and none ever
shows the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.stop import StopStrings


class Detokenizes(Protocol):
    """`shared.models.tokenizer.Detokenizer`: text as soon as its characters are whole."""

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


@dataclass(slots=True, frozen=True)
class Piece:
    """Text that is final, how many of the tokens given were used, and the stop string that ended it, if one did."""

    text: str
    used: int
    stop: str | None = None


class TextStream:
    """The text of one answer. Stop strings do not count within its first `min_tokens` tokens."""

    def __init__(self, detokenizer: Detokenizes, stops: list[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(tuple(stops))
        self._exempt = min_tokens if stops else 0

    def feed(self, tokens: list[int]) -> Piece:
        """Takes new tokens. After a piece with `stop` nothing more may be fed, and `flush` is not needed."""
        if not self._stops.stops:
            return Piece(self._detokenizer.push(tokens), len(tokens))
        text = ""
        for used, token in enumerate(tokens, 1):
            delta = self._detokenizer.push([token])
            if self._exempt > 0:
                self._exempt -= 1
                text += delta
                continue
            certain, stop = self._stops.feed(delta)
            text += certain
            if stop is not None:
                return Piece(text, used, stop)
        return Piece(text, len(tokens))

    def flush(self) -> Piece:
        """The end of the tokens: what was held back, up to a stop string that only now became whole."""
        certain, stop = self._stops.feed(self._detokenizer.finish())
        return Piece(certain if stop is not None else certain + self._stops.flush(), 0, stop)
