"""The continuous batch as a state machine over arrays. Lives on the compute thread; knows neither torch nor NATS.

Rows are dense: `rows[:active]` take part in the next step, `rows[active:]` are paused because their tail is full and no
page has been granted yet. Everything a step needs is kept in preallocated arrays by row and changed in place, so that a
step costs a few vector operations and one short loop, whatever the context lengths.

    waiting for `add` → active ⇄ paused → removed (finished, dropped, preempted, stale)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from shared.sampling import Choice, Finish, Sampler

Key = tuple[str, int]  # request id, attempt


@dataclass(slots=True, eq=False)
class Sequence:
    """One running sequence. `ready` are granted pages not yet sealed into: (index, generation)."""

    key: Key
    sampler: Sampler
    tail_slot: int
    tail_generation: int
    table: np.ndarray
    generations: np.ndarray
    tail_tokens: list[int]
    next_token: int
    row: int = -1
    requested: bool = False
    ready: deque[tuple[int, int]] = field(default_factory=deque)


@dataclass(slots=True)
class Seal:
    """A full tail to turn into page `block`, which becomes page number `at` of the sequence's table."""

    sequence: Sequence
    slot: int
    block: int
    generation: int
    at: int
    tokens: list[int]


@dataclass(slots=True)
class Emission:
    """What one step did for one sequence. `choice` None: its logits were not numbers."""

    sequence: Sequence
    choice: Choice | None
    finish: Finish | None
    pages: int


class DecodeBatch:
    """Capacity: `max_num_seqs` rows of at most `max_pages` pages of `block_size` tokens."""

    def __init__(self, max_num_seqs: int, max_pages: int, block_size: int) -> None:
        self.block_size = block_size
        self.rows: list[Sequence] = []
        self.active = 0
        self.arrangement = 0
        """Another number whenever a row has become another sequence's. As long as it is the same, tables only grow."""
        self.tokens = np.zeros(max_num_seqs, np.int64)
        self.positions = np.zeros(max_num_seqs, np.int64)
        self.tables = np.zeros((max_num_seqs, max_pages), np.int32)
        self.page_counts = np.zeros(max_num_seqs, np.int32)
        self.tail_slots = np.zeros(max_num_seqs, np.int32)
        self.tail_lengths = np.zeros(max_num_seqs, np.int32)
        self._generations = np.zeros((max_num_seqs, max_pages), np.uint32)
        self._tail_generations = np.zeros(max_num_seqs, np.uint32)

    def __len__(self) -> int:
        return len(self.rows)

    def can_add(self) -> bool:
        return len(self.rows) < len(self.tokens)

    def add(self, sequence: Sequence) -> None:
        """Takes `sequence` in; its table and tail hold every token but `next_token`."""
        if not self.can_add():
            raise ValueError("the batch is full")
        row, pages = len(self.rows), len(sequence.table)
        sequence.row = row
        self.arrangement += 1
        self.rows.append(sequence)
        self.tables[row, :pages] = sequence.table
        self._generations[row, :pages] = sequence.generations
        self.page_counts[row] = pages
        self.tail_slots[row] = sequence.tail_slot
        self._tail_generations[row] = sequence.tail_generation
        self.tail_lengths[row] = len(sequence.tail_tokens)
        self.tokens[row] = sequence.next_token
        self.positions[row] = pages * self.block_size + len(sequence.tail_tokens)
        self._swap(row, self.active)
        self.active += 1

    def remove(self, sequence: Sequence) -> None:
        """Forgets `sequence`; the rows stay dense."""
        if sequence.row < self.active:
            self.active -= 1
            self._swap(sequence.row, self.active)
        self._swap(sequence.row, len(self.rows) - 1)
        self.arrangement += 1
        self.rows.pop()
        sequence.row = -1

    def grant(self, sequence: Sequence, pages: Seq[tuple[int, int]]) -> Seal | None:
        """Adds granted pages. If `sequence` was paused it goes on, once the returned seal is carried out."""
        sequence.requested = False
        sequence.ready.extend(pages)
        if sequence.row < self.active or not sequence.ready:
            return None
        seal = self._seal(sequence)
        self._swap(sequence.row, self.active)
        self.active += 1
        return seal

    def begin(self) -> int:
        """Counts the rows the step is about to write into the tails; returns how many rows it has."""
        n = self.active
        self.tail_lengths[:n] += 1
        for row in range(n):
            sequence = self.rows[row]
            sequence.tail_tokens.append(sequence.next_token)
        return n

    def undo_begin(self) -> None:
        """Takes `begin` back: the step's results are thrown away, the next one writes the same bytes again."""
        self.tail_lengths[: self.active] -= 1
        for sequence in self.rows[: self.active]:
            sequence.tail_tokens.pop()

    def end(self, choices: Seq[Choice | None]) -> tuple[list[Emission], list[Seal]]:
        """Takes the step's choices in; returns what was emitted and which full tails to seal now.

        Finished sequences are removed (their last full tail is still sealed if a page is at hand: the next turn of a
        conversation can then use it); those with a full tail and no page are paused.
        """
        n = len(choices)
        emissions: list[Emission] = []
        seals: list[Seal] = []
        leaving: list[Sequence] = []
        full = (self.tail_lengths[:n] == self.block_size).tolist()
        counts = self.page_counts[:n].tolist()
        self.positions[:n] += 1
        stalled: list[Sequence] = []
        for row, choice in enumerate(choices):
            sequence = self.rows[row]
            finish = None
            if choice is not None:
                finish = sequence.sampler.accept(choice.token)
                sequence.next_token = choice.token
                self.tokens[row] = choice.token
            ends = finish is not None or choice is None
            pages = counts[row] + 1  # the tail counts as one
            if full[row]:
                if sequence.ready:
                    seals.append(self._seal(sequence))
                elif not ends:
                    stalled.append(sequence)
            if ends:
                leaving.append(sequence)
            emissions.append(Emission(sequence, choice, finish, pages))
        for sequence in leaving:
            self.remove(sequence)
        for sequence in stalled:
            self.active -= 1
            self._swap(sequence.row, self.active)
        return emissions, seals

    def hungry(self) -> list[Sequence]:
        """Sequences that should ask for their next page now: none is ready, one will be needed, none is on its way.

        Asking as soon as the last ready page is used leaves a whole page of steps for the answer, and never holds more
        than one page idle.
        """
        found = []
        for sequence in self.rows:
            if not sequence.ready and not sequence.requested and self._outgrows_tail(sequence):
                sequence.requested = True
                found.append(sequence)
        return found

    def stale(self, live: np.ndarray, blocks: int) -> list[Sequence]:
        """Sequences with a page or tail no longer theirs by `live`, the pool's generations (tails behind `blocks`)."""
        n = len(self.rows)
        if n == 0:
            return []
        width = int(self.page_counts[:n].max())
        used = np.arange(width, dtype=np.int32) < self.page_counts[:n, None]
        wrong = ((live[self.tables[:n, :width]] != self._generations[:n, :width]) & used).any(axis=1)
        wrong |= live[self.tail_slots[:n] + blocks] != self._tail_generations[:n]
        return [self.rows[row] for row in np.flatnonzero(wrong).tolist()] if wrong.any() else []

    def max_pages(self) -> int:
        """The longest table among the active rows."""
        return int(self.page_counts[: self.active].max(initial=0))

    def _outgrows_tail(self, sequence: Sequence) -> bool:
        # Every token still to come is one step and one more token in the tail. A page is needed only if a step comes
        # after the one that fills the tail: the KV of the last token is never written.
        room = self.block_size - int(self.tail_lengths[sequence.row])
        return sequence.sampler.remaining > room

    def _seal(self, sequence: Sequence) -> Seal:
        row, (block, generation) = sequence.row, sequence.ready.popleft()
        at = int(self.page_counts[row])
        self.tables[row, at] = block
        self._generations[row, at] = generation
        self.page_counts[row] = at + 1
        self.tail_lengths[row] = 0
        tokens, sequence.tail_tokens = sequence.tail_tokens, []
        return Seal(sequence, sequence.tail_slot, block, generation, at, tokens)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.arrangement += 1
        pages = int(max(self.page_counts[a], self.page_counts[b]))
        for matrix in (self.tables, self._generations):
            matrix[[a, b], :pages] = matrix[[b, a], :pages]
        for array in (
            self.tokens,
            self.positions,
            self.page_counts,
            self.tail_slots,
            self.tail_lengths,
            self._tail_generations,
        ):
            array[a], array[b] = array[b], array[a]
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        self.rows[a].row, self.rows[b].row = a, b
