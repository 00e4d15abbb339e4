"""The batch against a plain model: whatever is added, granted, stepped and dropped, rows stay dense and consistent."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.decode.batch import DecodeBatch, Seal, Sequence
from shared.messages import Sampling
from shared.sampling import Choice, Sampler

BLOCK, SEQS, MAX_LEN = 4, 5, 64
BLOCKS = 1000


def make(name: str, length: int, max_tokens: int, first_page: int) -> Sequence:
    tokens = list(range(length + 1))  # the last one is the input of the first step
    sampler = Sampler(
        Sampling(temperature=0.0), request_id=name, tokens=tokens, prompt_tokens=length, eos_token_ids=[],
        vocab_size=10**6, max_tokens=max_tokens, max_model_len=MAX_LEN,
    )  # fmt: skip
    pages = np.arange(first_page, first_page + length // BLOCK)
    tail = tokens[length // BLOCK * BLOCK : length]
    return Sequence((name, 0), sampler, first_page % 50, 7, pages, pages % 3, tail, tokens[-1])


class Model:
    """What one sequence must look like, kept the slow way."""

    def __init__(self, sequence: Sequence, length: int) -> None:
        self.sequence = sequence
        self.table = sequence.table.tolist()
        self.written = length
        self.granted = 0


class BatchMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.batch = DecodeBatch(SEQS, MAX_LEN // BLOCK, BLOCK)
        self.models: dict[str, Model] = {}
        self.names = 0
        self.pages = 0
        self.hungry: list[Sequence] = []
        self.arranged: dict[int, list[tuple[Sequence, list[int]]]] = {}

    def sealed(self, seal: Seal) -> None:
        model = self.models[seal.sequence.key[0]]
        assert seal.at == len(model.table)
        assert seal.tokens == list(range(seal.at * BLOCK, (seal.at + 1) * BLOCK))
        model.table.append(seal.block)

    @precondition(lambda self: self.batch.can_add())
    @rule(length=st.integers(1, 30), max_tokens=st.integers(2, 20))
    def add(self, length: int, max_tokens: int) -> None:
        name = f"s{self.names}"
        self.names += 1
        sequence = make(name, length, max_tokens, self.pages)
        self.pages += 8
        self.models[name] = Model(sequence, length)
        self.batch.add(sequence)

    @rule()
    def ask(self) -> None:
        self.hungry += self.batch.hungry()

    @precondition(lambda self: self.hungry)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        sequence = self.hungry.pop(data.draw(st.integers(0, len(self.hungry) - 1)))
        if sequence.row < 0:
            return
        assert sequence.sampler.remaining > 0
        page = self.pages
        self.pages += 1
        self.models[sequence.key[0]].granted += 1
        seal = self.batch.grant(sequence, [(page, page % 3)])
        if seal is not None:
            self.sealed(seal)

    @rule()
    def step(self) -> None:
        self.batch.begin()
        self.batch.undo_begin()
        n = self.batch.begin()
        stepped = self.batch.rows[:n]
        for row in range(n):
            model = self.models[self.batch.rows[row].key[0]]
            assert self.batch.positions[row] == model.written
            assert self.batch.tokens[row] == model.written  # token ids count up from 0
            model.written += 1
            assert model.written == self.batch.page_counts[row] * BLOCK + self.batch.tail_lengths[row]
        emissions, seals = self.batch.end([Choice(self.models[s.key[0]].written) for s in stepped])
        assert [emission.sequence for emission in emissions] == stepped
        for seal in seals:
            self.sealed(seal)
        for emission in emissions:
            if emission.finish is not None:
                assert emission.sequence.row == -1
                self.models.pop(emission.sequence.key[0])

    @precondition(lambda self: len(self.batch))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sequence = self.batch.rows[data.draw(st.integers(0, len(self.batch) - 1))]
        self.batch.remove(sequence)
        self.models.pop(sequence.key[0])

    @rule(data=st.data())
    def a_page_gets_another_tenant(self, data: st.DataObject) -> None:
        live = np.arange(BLOCKS + 50, dtype=np.uint32) % 3
        live[BLOCKS:] = 7
        assert self.batch.stale(live, BLOCKS) == []
        tables = [page for model in self.models.values() for page in model.table]
        if tables:
            page = data.draw(st.sampled_from(tables))
            live[page] += 1
            owners = {name for name, model in self.models.items() if page in model.table}
            assert {s.key[0] for s in self.batch.stale(live, BLOCKS)} == owners

    @invariant()
    def consistent(self) -> None:
        assert len(self.batch) == len(self.models)
        for row, sequence in enumerate(self.batch.rows):
            assert sequence.row == row
            model = self.models[sequence.key[0]]
            pages = int(self.batch.page_counts[row])
            assert self.batch.tables[row, :pages].tolist() == model.table
            tail = int(self.batch.tail_lengths[row])
            assert tail == len(sequence.tail_tokens) == model.written - pages * BLOCK
            paused = tail == BLOCK
            assert paused == (row >= self.batch.active)
            assert not (paused and sequence.ready)
        rows = [(sequence, self.models[sequence.key[0]].table[:]) for sequence in self.batch.rows]
        before = self.arranged.setdefault(self.batch.arrangement, rows)
        assert [sequence for sequence, _ in before] == self.batch.rows
        assert all(table[: len(then)] == then for (_, then), (_, table) in zip(before, rows, strict=True))


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_asks_for_no_page_it_will_not_fill() -> None:
    batch = DecodeBatch(SEQS, MAX_LEN // BLOCK, BLOCK)
    batch.add(make("exact", 4, 5, 0))  # 5 emitted, 1 already: 4 more steps fill the tail, and none follows
    assert batch.hungry() == []
    batch.add(make("more", 4, 6, 0))
    assert [s.key[0] for s in batch.hungry()] == ["more"]
    assert batch.hungry() == []  # it is on its way


def test_a_sequence_without_a_page_pauses_and_the_others_go_on() -> None:
    batch = DecodeBatch(SEQS, MAX_LEN // BLOCK, BLOCK)
    poor, rich = make("poor", 3, 20, 0), make("rich", 3, 20, 8)
    batch.add(poor)
    batch.add(rich)
    batch.grant(rich, [(100, 1)])
    assert batch.begin() == 2
    _, seals = batch.end([Choice(4), Choice(4)])
    assert [s.sequence for s in seals] == [rich]
    assert batch.active == 1 and batch.rows == [rich, poor]
    assert batch.begin() == 1
    batch.end([Choice(5)])
    seal = batch.grant(poor, [(101, 2)])
    assert seal is not None and (seal.block, seal.generation, seal.at, seal.tokens) == (101, 2, 0, [0, 1, 2, 3])
    assert batch.active == 2 and batch.tail_lengths[poor.row] == 0


def test_a_row_without_numbers_leaves_alone() -> None:
    batch = DecodeBatch(SEQS, MAX_LEN // BLOCK, BLOCK)
    bad, good = make("bad", 2, 20, 0), make("good", 2, 20, 8)
    batch.add(bad)
    batch.add(good)
    batch.begin()
    emissions, _ = batch.end([None, Choice(3)])
    assert emissions[0].choice is None and emissions[0].finish is None
    assert batch.rows == [good] and good.row == 0
