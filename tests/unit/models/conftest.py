"""Caches of their own for the tests of model files."""

from __future__ import annotations

from collections.abc import Callable
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
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFiles]:
    """The demo model in a dtype, converted once for all tests."""
    cache = tmp_path_factory.mktemp("demo")

    def get(dtype: str) -> ModelFiles:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVRELAY_CACHE_DIR", str(cache))
            return prepare("smollm2-135m", dtype)

    return get


@pytest.fixture(scope="session")
def demo(files: Callable[[str], ModelFiles]) -> ModelFiles:
    return files("bfloat16")


@pytest.fixture(scope="session")
def demo_tokenizer(demo: ModelFiles) -> Tokenizer:
    return Tokenizer.load(demo)
