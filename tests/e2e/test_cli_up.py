"""`kvrelay up` as a supervisor: ready means ready, what dies comes back, and nothing survives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.pipeline import RUN_LIMIT_S, Pipeline, pipeline
from tests.support.processes import alive, family

WORKER_OPTIONS = ("--max-model-len", "512")
OPTIONS = ("--num-blocks-override", "64", *WORKER_OPTIONS)
GENERATE = ("generate", "One two three", "--raw", "--max-tokens", "2", "--temperature", "0")
GONE_LIMIT_S = 15


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pipeline(tmp_path_factory.mktemp("up"), *OPTIONS) as started:
        yield started


def gone(pids: list[int]) -> bool:
    """Whether all processes end within the limit."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_ready_means_that_every_actor_is(running: Pipeline) -> None:
    assert httpx.get(f"{running.url}/health", timeout=5).status_code == 200
    found = running.stats()
    assert {actor["name"]: actor["health"] for actor in found["actors"]} == dict.fromkeys(
        ("block_manager", "decode", "gateway", "offload", "prefill"), "ready"
    )
    assert all(alive(actor["pid"]) for actor in found["actors"])
    pool = found["pools"]["cpu0"]
    assert pool["total"] == 64
    assert sum(pool[state] for state in ("free", "filling", "active", "cached", "quarantined")) == 64
    assert pool["bytes_total"] == 64 * pool["page_bytes"]


def test_a_killed_nats_server_comes_back_where_it_was(running: Pipeline) -> None:
    servers = [pid for pid in family(running.process.pid) if "nats-server" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(servers) == 1
    before = running.pids()
    os.kill(servers[0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (done := running.cli(*GENERATE)).returncode and time.monotonic() < deadline:
        continue
    assert done.returncode == 0, done.stderr
    running.wait_ready(10)
    assert running.pids() == before, "no actor had to be restarted"
    said = running.log.read_text()
    assert "nats ended (killed by SIGKILL); starting it again now" in said
    assert "Traceback" not in said and '"level"' not in said


def test_flags_reach_the_actors_and_the_summary_says_where_things_are(running: Pipeline) -> None:
    summary = json.loads((running.state / "up.json").read_text())
    assert summary["http_url"] == running.url
    assert summary["nats_url"] == f"nats://127.0.0.1:{running.nats_port}"
    assert summary["pid"] == running.process.pid
    done = running.cli("generate", "word " * 600, "--raw")
    assert done.returncode == 1 and "512" in done.stderr


def test_another_worker_joins_and_leaves(running: Pipeline) -> None:
    command = [
        sys.executable,
        "-m",
        "services.cli",
        "run",
        "decode",
        "--state-dir",
        str(running.state),
        "--threads",
        "1",
    ]
    extra = subprocess.Popen(
        [*command, *WORKER_OPTIONS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while {"decode": extra.pid, "health": "ready"} not in decoders(running) and time.monotonic() < deadline:
            assert extra.poll() is None
        assert len(decoders(running)) == 2
        extra.terminate()
        assert extra.wait(30) == 0
    finally:
        extra.kill()
        extra.wait()
    assert len(decoders(running)) == 1


def decoders(running: Pipeline) -> list[dict[str, Any]]:
    actors = running.stats()["actors"]
    return [{"decode": one["pid"], "health": one["health"]} for one in actors if one["name"] == "decode"]


def started(state: Path, *options: str) -> tuple[subprocess.Popen[str], dict[str, Any], list[int]]:
    """A pipeline with --json, what it said when it was ready, and the pids of its whole family."""
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--state-dir", str(state), "--http-port", "0"]
    process = subprocess.Popen(
        [*command, *OPTIONS, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            return process, event, family(process.pid)
    raise AssertionError(process.communicate())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_in_order(tmp_path: Path, number: int) -> None:
    process, ready, pids = started(tmp_path)
    assert ready["seconds"] > 0 and ready["http_url"].startswith("http://127.0.0.1:")
    assert httpx.get(ready["http_url"] + "/health", timeout=5).status_code == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert not [pid for pid in pids if alive(pid)]
    assert err == ""
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["stopping"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"up.lock", "nats", "logs"}


def test_nothing_survives_a_killed_supervisor_and_the_next_one_starts(tmp_path: Path) -> None:
    process, _, pids = started(tmp_path)
    process.kill()
    process.communicate()
    assert gone(pids), "children of a killed `kvrelay up` must end"
    process, _, pids = started(tmp_path, "--decode-workers", "2")
    actors = [child for child in pids if "services.decode" in Path(f"/proc/{child}/cmdline").read_text()]
    assert len(actors) == 2
    process.terminate()
    assert process.wait(30) == 0
    process.communicate()
    assert gone(pids)


def test_stopping_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--state-dir", str(tmp_path), "--http-port", "0"]
    process = subprocess.Popen([*command, *OPTIONS], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "nats"
    pids = family(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert gone(pids)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--block-size", "17"), "block_size"),
        (("--kernels", "triton"), "triton"),
        (("--nats-url", "nats://a:b@127.0.0.1:1"), "cannot reach NATS"),
    ],
)
def test_what_the_actors_cannot_do_ends_the_start_with_their_reason(
    tmp_path: Path, options: tuple[str, ...], word: str
) -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--state-dir", str(tmp_path), "--http-port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    assert done.returncode == 1
    assert word in done.stderr and "Traceback" not in done.stderr


def test_without_a_compiler_it_answers_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pipeline(tmp_path, *OPTIONS) as there:
        assert "reference kernels" in there.log.read_text()
        answer = there.generate("One two three", "--raw", "--max-tokens", "2")
        for actor in ("prefill", "decode"):
            lines = map(json.loads, (tmp_path / "logs" / f"{actor}.log").read_text().splitlines())
            (said,) = [line for line in lines if line["event"].startswith("kernels: reference")]
            assert said["level"] == "warning" and "failed" in said["event"]
    assert answer["usage"]["completion_tokens"] == 2


def test_wrong_credentials_of_an_external_server_are_refused_at_once(running: Pipeline, tmp_path: Path) -> None:
    url = f"nats://admin:wrong@127.0.0.1:{running.nats_port}"
    command = [sys.executable, "-m", "services.cli", "up", "--state-dir", str(tmp_path), "--nats-url", url]
    done = subprocess.run(
        [*command, "--http-port", "0"], capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "credentials" in done.stderr and "wrong" not in done.stderr
