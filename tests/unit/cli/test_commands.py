"""The command line as a user meets it when no pipeline runs: quick, clear, right exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ("up", "run", "generate", "stats", "doctor", "models")


def kvrelay(*arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert "Traceback" not in done.stderr
    return done


def test_help_lists_every_command_and_each_has_its_own() -> None:
    done = kvrelay("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command in done.stdout
        assert kvrelay(command, "--help").returncode == 0


def test_no_command_imports_torch() -> None:
    code = (
        "import importlib, sys; from services.cli import __main__, pipeline\n"
        f"for name in {COMMANDS}: importlib.import_module(f'services.cli.commands.{{name}}')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("nonsense",), "nonsense"),
        (("generate",), "prompt"),
        (("generate", ""), "empty"),
        (("generate", "hi", "--temperature", "-1"), "temperature"),
        (("generate", "hi", "--max-tokens", "many"), "max-tokens"),
        (("generate", "hi", "--raw", "--system", "x"), "system"),
        (("run", "nobody"), "nobody"),
        (("up", "--prefill-workers", "0"), "prefill-workers"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], word: str) -> None:
    done = kvrelay(*arguments)
    assert done.returncode == 2
    assert word in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generate", "hi"), "kvrelay up"),
        (("generate", "hi", "--nats-url", "nats://a:b@127.0.0.1:1"), "cannot reach NATS"),
        (("stats",), "kvrelay up"),
        (("stats", "--json"), "kvrelay up"),
        (("run", "offload", "--http-port", "3"), "offload has no setting http_port"),
        (("models", "prepare", "no-such-model"), "no-such-model"),
        (("up", "--http-port", "0", "--model", "no-such-model"), "no-such-model"),
        (("up", "--http-port", "0", "--block-size", "0"), "block_size"),
    ],
)
def test_what_cannot_be_done_is_exit_code_1_and_one_line(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    where = () if arguments[0] == "models" or "--nats-url" in arguments else ("--state-dir", str(tmp_path))
    done = kvrelay(*arguments, *where)
    assert done.returncode == 1
    assert word in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_models_lists_names_and_conversions() -> None:
    listed = json.loads(kvrelay("models", "--json").stdout)
    assert {"name", "installed", "source"} <= set(listed["known"][0])
    assert [model["name"] for model in listed["known"]] == ["smollm2-135m"]
    assert isinstance(listed["converted"], list)


def test_doctor_reports_the_machine_and_what_to_fix(tmp_path: Path) -> None:
    done = kvrelay("doctor", "--json", "--state-dir", str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    found = {finding["name"]: finding for finding in report["findings"]}
    needed = ("python", "torch", "cores", "instructions", "memory", "shared memory", "GPU", "C compiler", "pipeline")
    assert set(needed) <= set(found)
    assert all(finding["fix"] for finding in report["findings"] if finding["level"] != "ok")
    assert "kvrelay up" in found["pipeline"]["fix"]


def test_doctor_fails_on_a_pipeline_it_cannot_reach() -> None:
    done = kvrelay("doctor", "--json", "--nats-url", "nats://a:b@127.0.0.1:1")
    assert done.returncode == 1
    assert [one["name"] for one in json.loads(done.stdout)["findings"] if one["level"] == "fail"] == ["pipeline"]
