"""`kvrelay calibrate` as a user runs it, on a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.scale_file import read
from shared.models import files
from tests.e2e.pipeline import RUN_LIMIT_S
from tests.support.tiny_models import folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    folder(path, "llama")
    return path


def calibrate(
    model: Path, *arguments: str, text: str = "hello world\nhell\n", **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "calibrate", "--model", str(model), *arguments]
    environment = {**os.environ, **environ}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=RUN_LIMIT_S, env=environment, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_it_writes_a_file_that_up_accepts(model: Path, tmp_path: Path) -> None:
    found = {}
    for suffix in ("json", "safetensors"):
        out = tmp_path / f"scales.{suffix}"
        done = calibrate(model, "--prompts", "-", "--out", str(out), "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        identity = files.prepare(str(model), "bfloat16").identity
        found[suffix] = read(out, 3, identity, "fp8_e4m3_per_tensor", "fp8_e4m3_per_tensor")
        assert (said["path"], said["prompts"], said["tokens"]) == (str(out), 2, found[suffix].tokens)
        assert tuple(said["k_scale"]) == found[suffix].k_scale != found[suffix].v_scale
    assert found["json"] == found["safetensors"]


def test_settings_choose_the_format_and_chats_go_through_the_template(model: Path, tmp_path: Path) -> None:
    out, chats = tmp_path / "scales.json", tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    given = ("--prompts", str(chats), "--out", str(out), "--policy", "smoothed_max", "--v-cache-dtype", "int4")
    done = calibrate(model, *given, KVRELAY_KV_CACHE_DTYPE="int8_per_tensor")
    assert done.returncode == 0 and f"--kv-scales-path {out}" in done.stdout
    written = json.loads(out.read_text())
    assert (written["k_format"], written["v_format"]) == ("int8_per_tensor", "int4")
    assert written["policy"] == "smoothed_max" and int(written["tokens"]) > len("hello")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("--prompts", "-", "--out", "scales.txt"), 2, ".safetensors or .json"),
        (("--prompts", "-", "--out", "/nowhere/scales.json"), 2, "not a folder"),
        (("--prompts", "-", "--out", "s.json", "--policy", "mean"), 2, "smoothed_max"),
        (("--prompts", "/nowhere", "--out", "s.json"), 1, "cannot read /nowhere"),
        (("--prompts", "-", "--out", "s.json", "--kv-cache-dtype", "int9"), 2, "no KV format 'int9'"),
        (("--prompts", "-", "--out", "s.json", "--kv-cache-dtype", "int8"), 1, "nothing to calibrate"),
    ],
)
def test_what_cannot_be_is_said(model: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    done = calibrate(model, *arguments)
    assert done.returncode == code and word in " ".join(done.stderr.split()), done.stderr
    assert not Path("s.json").exists()
