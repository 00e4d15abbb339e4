"""A stage for tests of the gateway (see `scripted.py`): one per file, or one of their own for tests that kill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.scripted import Stage, stage


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
