"""The command line as a user meets it when no pipeline runs: quick, clear, right exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build
from services.cli import machine
from services.cli.commands import doctor
from services.cli.machine import Finding
from services.cli.options import KINDS, NOT_FLAGS

COMMANDS = ("up", "run", "generate", "stats", "doctor", "models")


def kvrelay(*arguments: str, limit_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment)
    assert "Traceback" not in done.stderr
    return done


def test_help_lists_every_command_and_each_has_its_own() -> None:
    done = kvrelay("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command in done.stdout
        assert kvrelay(command, "--help").returncode == 0


def test_every_flag_is_shown_whole_however_narrow_the_terminal_is() -> None:
    said = kvrelay("up", "--help", COLUMNS="50").stdout
    flags = {name for kind in KINDS.values() for name in kind.model_fields} - NOT_FLAGS
    assert {f"--{name.replace('_', '-')}" for name in flags} <= set(re.findall(r"--[a-z-]+", said))


def test_characters_that_the_terminal_does_not_have_are_question_marks(tmp_path: Path) -> None:
    done = kvrelay("doctor", "--state-dir", str(tmp_path), PYTHONIOENCODING="ascii")
    assert "? no pipeline runs" in done.stdout


def test_json_needs_no_unicode_terminal(tmp_path: Path) -> None:
    done = kvrelay("doctor", "--json", "--state-dir", str(tmp_path / "é"), PYTHONIOENCODING="ascii")
    assert any("é" in finding["fix"] for finding in json.loads(done.stdout)["findings"])


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "services.cli", "models", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


def test_brackets_are_text_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._show([Finding("x", "warn", "pip install -e '.[gpu]'", "see [/nowhere]")])
    said = capsys.readouterr().out
    assert ".[gpu]" in said and "[/nowhere]" in said


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
        (("up", "--block-size", "0"), "block_size"),
        (("up", "--kv-cache-dtype", "int7"), "int7"),
        (("up", "--nats-url", "nats://somewhere", "--nats-port", "4222"), "nats-port"),
        (("generate", "hi", "--cache-salt", "caf\udce9"), "UTF-8"),
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
        (("run", "offload", "--http-port", "3"), "offload has no setting 'http_port'; it belongs to gateway"),
        (("models", "prepare", "no-such-model"), "no-such-model"),
        (("up", "--http-port", "0", "--model", "no-such-model"), "no-such-model"),
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


@pytest.mark.parametrize(
    ("command", "level", "word"),
    [
        ("cc -O1", "ok", "cc"),
        ("no-such-compiler", "warn", "none"),
        ("false", "warn", "cannot compile"),
        ('cc "', "warn", "No closing"),
    ],
)
def test_doctor_tries_the_compiler_that_kernels_would_be_built_with(
    command: str, level: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    build.compiler.cache_clear()
    try:
        (found,) = (one for one in machine.findings(Path("/tmp"), Path("/tmp")) if one.name == "C compiler")
    finally:
        build.compiler.cache_clear()
    assert found.level == level and word in found.value
    assert ("reference kernels" in found.fix) == (level == "warn")


def test_doctor_fails_on_a_pipeline_it_cannot_reach() -> None:
    done = kvrelay("doctor", "--json", "--nats-url", "nats://a:b@127.0.0.1:1")
    assert done.returncode == 1
    assert [one["name"] for one in json.loads(done.stdout)["findings"] if one["level"] == "fail"] == ["pipeline"]


def test_up_refuses_an_instruction_set_that_does_not_exist(tmp_path: Path) -> None:
    done = kvrelay("up", "--state-dir", str(tmp_path), KVRELAY_CPU_ISA="avx1024")
    assert done.returncode == 1
    assert "KVRELAY_CPU_ISA=avx1024" in done.stderr and "avx2" in done.stderr
