"""What holds for every kind of pool memory, whoever attaches it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

import pytest

import shared.pool
from shared.errors import Stale
from shared.pool import Pool, attach
from tests.support.pools import describe, handles, make_pool, tiny_layout

NOT_KINDS = {"base", "layout", "huge_pages", "cuda_driver", "cuda_stream"}


def test_every_kind_has_a_contract_run() -> None:
    kinds = {module.name for module in iter_modules(shared.pool.__path__)} - NOT_KINDS
    assert kinds == {"shm", "cuda_ipc"}  # the latter: tests/unit/pool/test_cuda_ipc.py


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pool, Pool]]:
    """The owner's pool and a reader's."""
    monkeypatch.setenv("KVRELAY_SHM_DIR", str(tmp_path))
    owner = make_pool(tmp_path)
    reader = attach(describe(owner, tiny_layout()))
    yield owner, reader
    reader.close()
    owner.close()


def test_shapes(sides: tuple[Pool, Pool]) -> None:
    for pool in sides:
        assert (pool.pages.shape, pool.tails.shape, pool.generations.shape) == ((8, 4096), (2, 1024), (10,))
        assert pool.live_epoch() == pool.epoch != 0


def test_a_reader_between_look_up_and_read_sees_that_the_page_was_let_again(sides: tuple[Pool, Pool]) -> None:
    owner, reader = sides
    table, tail = handles(owner, [2, 3], 1)
    owner.pages[3] = 1
    reader.check(table, tail=tail)
    owner.generations[3] += 1  # before the new tenant may write
    owner.pages[3] = 2
    assert (reader.pages[3] == 2).all()
    with pytest.raises(Stale, match="new tenant"):
        reader.check(table, tail=tail)


def test_a_tail_that_was_let_again_is_stale(sides: tuple[Pool, Pool]) -> None:
    owner, reader = sides
    table, tail = handles(owner, [2], 1)
    owner.generations[owner.blocks + 1] += 1
    reader.check(table)
    with pytest.raises(Stale, match="tail"):
        reader.check(table, tail=tail)


def test_generations_wrap(sides: tuple[Pool, Pool]) -> None:
    owner, reader = sides
    owner.generations[2] = 2**32 - 1
    table, _ = handles(owner, [2])
    owner.generations[[2]] += 1
    assert owner.generations[2] == 0
    with pytest.raises(Stale):
        reader.check(table)


def test_handles_of_another_pool_or_incarnation_are_stale(sides: tuple[Pool, Pool]) -> None:
    owner, reader = sides
    table, _ = handles(owner, [2])
    for change in ({"pool": "q"}, {"epoch": owner.epoch + 1}):
        with pytest.raises(Stale):
            reader.check(table.model_copy(update=change))


def test_an_owner_that_gives_the_memory_up_makes_every_reader_stale(sides: tuple[Pool, Pool]) -> None:
    owner, reader = sides
    table, tail = handles(owner, [2], 0)
    owner.close()
    with pytest.raises(Stale, match="anew"):
        reader.check(table, tail=tail)
