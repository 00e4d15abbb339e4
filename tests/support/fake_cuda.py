"""The stand-in for the NVIDIA driver, `fake_cuda*.c`, for this process or for others."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.pool import cuda_driver

ROOT = Path(__file__).parents[2]
SOURCES = sorted(Path(__file__).parent.glob("fake_cuda*.c"))


def build(folder: Path) -> dict[str, str]:
    """Builds it in `folder`, where its memory will be, too; the variables that other processes need to find it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, *SOURCES], check=True)
    own = {"LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_DIR": str(folder), "KVRELAY_SHM_DIR": str(folder)}
    return os.environ | own | {"PYTHONPATH": str(ROOT)}


@contextmanager
def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """This process uses it; gives the variables for others."""
    environment = build(folder)
    for name in ("FAKE_CUDA_DIR", "KVRELAY_SHM_DIR"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setattr(cuda_driver, "_LIBRARIES", (str(folder / "libcuda.so.1"),))
    cuda_driver._driver.cache_clear()
    yield environment
    cuda_driver._driver.cache_clear()
