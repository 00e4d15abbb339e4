"""Engines and the memory they work on: nothing is reported, and no handle is checked for the last time, before the
device has finished with the pages; without memory there is no work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from services.decode.batch import Sequence
from services.decode.engine import DecodeEngine, Report
from services.prefill.engine import Computed, Gone, PrefillEngine
from services.prefill.scheduler import Prompt
from shared.errors import Stale
from shared.messages import Sampling
from shared.models import files, runtime
from shared.models.transformer import Transformer
from shared.pool import shm
from shared.pool.layout import geometry, layout_for
from shared.pool.shm import ShmPool
from shared.sampling import Sampler
from shared.settings import BlockManagerSettings
from tests.support.tiny_models import VOCABULARY, folder

BLOCK = 16


@dataclass(frozen=True, slots=True)
class LateMemory(runtime.Memory):
    """As on a device that runs behind: what is written shows in the pool at a fence. `meanwhile` happens before one."""

    meanwhile: list[Callable[[], None]] = field(default_factory=list)

    def fence(self) -> None:
        assert self.pool is not None
        while self.meanwhile:
            self.meanwhile.pop()()
        self.pool.pages[:] = self.pages.numpy()
        self.pool.tails[:] = self.tails.numpy()


@dataclass
class World:
    model: Transformer
    pool: ShmPool
    memory: LateMemory


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KVRELAY_SHM_DIR", str(tmp_path))
    folder(tmp_path / "model", "llama")
    prepared = files.prepare(str(tmp_path / "model"), "float32")
    layout = layout_for(prepared, BlockManagerSettings(model=str(tmp_path / "model"), dtype="float32"))
    pool = shm.create("p", tmp_path, layout, 8, 2)
    private = runtime.Memory.private(layout, 8, 2)
    memory = LateMemory(private.pages, private.tails, geometry(layout), pool)
    yield World(runtime.load(prepared, "float32", "cpu", 1), pool, memory)
    pool.close()


def sampler(length: int) -> Sampler:
    return Sampler(
        Sampling(temperature=0.0, ignore_eos=True), request_id="r", tokens=np.arange(length), prompt_tokens=length,
        eos_token_ids=(), vocab_size=VOCABULARY, max_tokens=40, max_model_len=128,
    )  # fmt: skip


def prefill(world: World, report: Callable[[Computed | Gone], None]) -> PrefillEngine:
    engine = PrefillEngine(world.model, BLOCK, report, lambda: True)
    engine.map(world.memory)
    tokens, table = np.arange(2 * BLOCK + 3), np.array([5, 2], dtype=np.int32)
    engine.add(Prompt(("r", 0), tokens, table, world.pool.generations[table], 0, 0, 0, BLOCK), sampler(len(tokens)))
    return engine


def decode(world: World, report: Callable[[Report], None]) -> DecodeEngine:
    engine = DecodeEngine(world.model, 2, 128, BLOCK, report, lambda: True)
    engine.map(world.memory)
    nothing, tail = np.zeros(0, np.int32), list(range(BLOCK - 1))
    sequence = Sequence(("r", 0), sampler(BLOCK), 1, 0, nothing, nothing.astype(np.uint32), tail, 3)
    sequence.ready.append((6, int(world.pool.generations[6])))
    engine.add(sequence)
    return engine


def test_a_reported_chunk_is_in_the_pages(world: World) -> None:
    seen = []

    def report(event: Computed | Gone) -> None:
        assert isinstance(event, Computed)
        for page in [5, 2][event.chunk.first_page : event.chunk.first_page + event.chunk.pages]:
            assert world.pool.pages[page].any()
        assert world.pool.tails[0].any() == (event.chunk.tail > 0)
        seen.append(event)

    engine = prefill(world, report)
    while engine.step():
        pass
    assert len(seen) == 3
    assert torch.equal(world.memory.pages, torch.from_numpy(world.pool.pages.copy()))


def test_a_reported_seal_is_in_its_page(world: World) -> None:
    seals = []

    def report(event: Report) -> None:
        assert all(world.pool.pages[seal.block].any() for seal in event.seals)
        seals.extend(event.seals)

    engine = decode(world, report)
    while not seals:
        engine.step()
    assert [seal.block for seal in seals] == [6]


def test_a_page_that_is_let_again_while_the_device_works_makes_the_result_stale(world: World) -> None:
    def let_again() -> None:
        world.pool.generations[5] += 1  # the prompt's first page
        world.pool.generations[8 + 1] += 1  # the sequence's tail

    heard: list[Gone | Computed] = []
    engine = prefill(world, heard.append)
    world.memory.meanwhile.append(let_again)
    assert not engine.step()
    assert isinstance(heard[0], Gone) and isinstance(heard[0].error, Stale)

    reports: list[Report] = []
    decoding = decode(world, reports.append)
    world.pool.generations[8 + 1] = 0
    world.memory.meanwhile.append(let_again)
    assert not decoding.step()
    assert [type(error) for report in reports for _, error in report.gone] == [Stale]
    assert not any(report.emissions or report.seals for report in reports)


def test_work_that_comes_between_two_incarnations_is_stale(world: World) -> None:
    heard: list[Gone | Computed] = []
    engine = prefill(world, heard.append)
    engine.map(None)
    engine.add(
        Prompt(("s", 0), np.arange(3), np.zeros(0, np.int32), np.zeros(0, np.uint32), 0, 0, 0, BLOCK), sampler(3)
    )
    assert not engine.step()
    assert [(event.key, type(event.error)) for event in heard] == [(("r", 0), Stale), (("s", 0), Stale)]

    reports: list[Report] = []
    decoding = decode(world, reports.append)
    sequence = decoding.batch.rows[0]
    decoding.map(None)
    decoding.add(sequence)
    assert not decoding.step()
    gone = [(key, type(error)) for report in reports for key, error in report.gone]
    assert gone == [(("r", 0), Stale), (("r", 0), Stale)]


def test_a_step_is_reported_while_the_next_one_computes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes between, or behind the last step, comes after it."""
    told: list[str] = []

    def report(event: Report) -> None:
        told.append("gone" if event.gone else f"{len(event.emissions)} emitted")

    engine = decode(world, report)
    forward = world.model.forward

    def watched(*arguments: object, meanwhile: Callable[[], None]) -> torch.Tensor:
        def mark() -> None:
            told.append("computing")
            meanwhile()

        return forward(*arguments, meanwhile=mark)  # type: ignore[arg-type]

    monkeypatch.setattr(world.model, "forward", watched)
    assert engine.step() and told == ["computing"]
    assert engine.step() and told[1:] == ["computing", "1 emitted"]
    engine.drop(("r", 0))
    assert told[3:] == ["1 emitted", "gone"]
    assert not engine.step() and len(told) == 5


def test_the_last_step_is_reported_at_once(world: World) -> None:
    emitted = []
    engine = decode(world, lambda event: emitted.extend(event.emissions))
    engine.grant(("r", 0), [(block, int(world.pool.generations[block])) for block in (0, 1, 3)])
    steps = 0
    while engine.step():
        steps += 1
        assert len(emitted) == steps - 1
    assert len(emitted) == steps + 1 and emitted[-1].finish is not None


def test_a_step_is_reported_even_if_the_next_one_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = []
    engine = decode(world, lambda event: emitted.extend(event.emissions))
    assert engine.step() and not emitted

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the test breaks the model")

    monkeypatch.setattr(world.model, "forward", fail)
    with pytest.raises(RuntimeError, match="breaks the model"):
        engine.step()
    assert len(emitted) == 1


def test_a_step_is_reported_when_leases_are_not_safe_any_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = []
    engine = decode(world, lambda event: emitted.extend(event.emissions))
    assert engine.step() and not emitted
    monkeypatch.setattr(engine, "_safe", lambda: False)
    assert not engine.step() and len(emitted) == 1
