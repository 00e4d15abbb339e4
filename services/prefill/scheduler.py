"""Which chunk of which prompt is computed next. Pure: no torch, no NATS, no clock.

Requests take turns, one chunk each, so a short prompt waits for at most one chunk of every other running request, and a
chunk is short enough that decode, on the same cores, keeps its pace between two of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

Key = tuple[str, int]  # request id, attempt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … stop` of a prompt: its first `pages` whole pages are sealed, `tail` tokens go to the tail."""

    start: int
    stop: int
    first_page: int
    pages: int
    tail: int
    last: bool


class Prompt:
    """A prompt being computed. `table` and `generations` cover at least its whole pages; `computed` tokens are done."""

    def __init__(
        self,
        key: Key,
        tokens: np.ndarray,
        table: np.ndarray,
        generations: np.ndarray,
        tail_slot: int,
        tail_generation: int,
        cached_tokens: int,
        block_size: int,
    ) -> None:
        if cached_tokens % block_size or not 0 <= cached_tokens < len(tokens):
            raise ValueError(f"{cached_tokens} cached of {len(tokens)} tokens is not a whole number of pages below all")
        if len(table) < len(tokens) // block_size or len(table) != len(generations):
            raise ValueError(f"{len(tokens)} tokens need {len(tokens) // block_size} pages, not {len(table)}")
        self.key = key
        self.tokens = tokens
        self.table = table
        self.generations = generations
        self.tail_slot = tail_slot
        self.tail_generation = tail_generation
        self.computed = cached_tokens
        self.block_size = block_size

    def next_chunk(self, max_tokens: int) -> Chunk:
        """The next at most `max_tokens` (whole pages) tokens; only the last chunk may end inside a page."""
        start = self.computed
        stop = min(len(self.tokens), start + max_tokens)
        pages, tail = divmod(stop - start, self.block_size)
        last = stop == len(self.tokens)
        return Chunk(start, stop, start // self.block_size, pages, tail, last)

    def advance(self, chunk: Chunk) -> None:
        """Counts `chunk` as computed."""
        self.computed = chunk.stop


class RoundRobin:
    """The running prompts, in turn."""

    def __init__(self) -> None:
        self._turn: deque[Prompt] = deque()

    def __len__(self) -> int:
        return len(self._turn)

    def add(self, prompt: Prompt) -> None:
        """A new prompt takes its turn after one chunk of each that is already running."""
        self._turn.append(prompt)

    def next(self) -> Prompt | None:
        """The prompt whose turn it is; it goes to the end of the queue."""
        if not self._turn:
            return None
        prompt = self._turn.popleft()
        self._turn.append(prompt)
        return prompt

    def remove(self, key: Key) -> Prompt | None:
        """Takes the prompt out, finished or not; None if it is not here."""
        for prompt in self._turn:
            if prompt.key == key:
                self._turn.remove(prompt)
                return prompt
        return None

    def all(self) -> list[Prompt]:
        return list(self._turn)
