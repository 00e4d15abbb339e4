"""The Triton kernels without a GPU: all of `tests/gpu` in the interpreter, and the decode kernels compiled for GPUs.

Both in processes of their own: Triton reads TRITON_INTERPRET at import, and its cache must not outlive the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=given, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
def test_every_op_in_the_interpreter(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu",
               TRITON_INTERPRET="1")  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_kernels_compile_for_each_architecture_and_decode_does_not_spill(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "kernels.triton.matrix", "--sample", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
