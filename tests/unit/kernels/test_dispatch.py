"""Which backend is picked, and what happens when it cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import build
from kernels.dispatch import BackendUnavailable, select


def _forget() -> None:
    for cached in (build.compiler, build.load, select):
        cached.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C compiler."""
    with monkeypatch.context() as patch:
        patch.setenv("CC", "no-such-compiler")
        _forget()
        yield
    _forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is triton here")
def test_auto_takes_the_native_kernels() -> None:
    assert select("auto").name == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is triton here")
def test_without_a_compiler_auto_falls_back_and_says_so_once(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kernels.dispatch"):
        assert select("auto").name == "reference" and select("auto").name == "reference"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "no C compiler" in caplog.text


def test_without_a_compiler_an_explicit_choice_is_an_error(no_compiler: None) -> None:
    with pytest.raises(BackendUnavailable, match="no C compiler"):
        select("cpu")


def test_unknown_backends_and_ops_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="numpy"):
        select("numpy")
    with pytest.raises(BackendUnavailable, match="fly"):
        select("reference").fly()
