"""Pipelines that tests share which leave them as they found them, and stages for tests of the gateway.

A stage (see `scripted.py`) is there once per file, or once per test for tests that kill.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.pipeline import Pipeline, pipeline
from tests.e2e.scripted import Stage, stage


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a user, in whose default place `bf16` runs."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def bf16(home: Path) -> Iterator[Pipeline]:
    """As `kvrelay up` starts without settings, but for the size of the pool."""
    with pipeline(home / ".local/state/kvrelay", "--num-blocks-override", "600") as running:
        yield running


@pytest.fixture(scope="session")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """Where rounding cannot turn a near-tie, so that tokens may be compared between shapes."""
    with pipeline(tmp_path_factory.mktemp("fp32"), "--dtype", "float32", "--num-blocks-override", "600") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("stage")) as ready:
        yield ready


@pytest.fixture
def on(standing_stage: Stage) -> Stage:
    standing_stage.reset()
    return standing_stage


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path) as ready:
        yield ready
