"""What the README tells a newcomer to type works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.pipeline import Pipeline

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def environment(home: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "XDG_STATE"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return {**inherited, "HOME": str(home), "PATH": path}


def test_the_python_client(bf16: Pipeline, home: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(programs) == 1
    command = [sys.executable, "-c", programs[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(home), check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10


def test_the_shell_commands(bf16: Pipeline, home: Path) -> None:
    lines = re.findall(r"^    (kvrelay (?:generate|stats).*)$", README, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        command = [sys.executable, "-m", "services.cli", *shlex.split(line)[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(home), check=False)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout.strip(), line


def test_curl(bf16: Pipeline) -> None:
    found = re.search(r"^    (curl .*?'\{.*?\}')$", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    words = shlex.split(found[1])
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    words[1] = words[1].replace("http://127.0.0.1:8000", bf16.url)
    try:
        done = subprocess.run([*words, "--silent"], capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("this machine has no curl")
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", done.stdout
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
