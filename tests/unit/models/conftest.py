"""Caches of their own for the tests of model files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.models.files import ModelFiles, prepare
from shared.models.tokenizer import Tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    """The demo model in bfloat16, converted once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_CACHE_DIR", str(tmp_path_factory.mktemp("demo")))
        yield prepare("smollm2-135m", "bfloat16")


@pytest.fixture(scope="session")
def demo_tokenizer(demo: ModelFiles) -> Tokenizer:
    return Tokenizer.load(demo)
