"""Every variant of a Triton kernel that serving needs is compiled before a worker reports ready, and there are few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
MOST = 40


@pytest.mark.parametrize(("role", "kv_cache_dtype"), [("prefill", "int8_channel"), ("decode", "auto")])
def test_nothing_is_compiled_once_a_worker_is_ready(role: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_variants", str(tmp_path), kv_cache_dtype, role],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["later"] == []
    assert 10 < found["ready"] <= MOST
