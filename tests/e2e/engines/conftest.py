"""A tiny model, and prefill, decode and block manager that serve it in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.engines import OPTIONS, Engines, engines
from tests.support.tiny_models import folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    folder(path, "llama", max_position_embeddings=512)
    return str(path)


@pytest.fixture
async def running(tmp_path: Path, model: str, request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    options = OPTIONS | getattr(request, "param", {})
    async with engines(tmp_path, model=model, **options) as started:
        yield started
        await started.until_free()
        assert started.manager.node.check() == []
