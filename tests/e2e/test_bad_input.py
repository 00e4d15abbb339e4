"""Bad input is refused at once, by name, at all three doors; the pipeline goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from tests.e2e.pipeline import RUN_LIMIT_S, Pipeline, collect, free_port

GOOD = {"prompt": "The capital of France is", "max_tokens": 3, "sampling": {"temperature": 0.0}}

# what the client sends, the code it gets, a word that the text must contain
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "empty"),
    ({"messages": []}, 400, "empty"),
    ({"token_ids": []}, 400, "empty"),
    ({"prompt": "a", "token_ids": [1]}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": 7}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1_000_000_000}, 413, "max_tokens"),
    ({"prompt": "a", "sampling": {"temperature": -0.5}}, 400, "temperature"),
    ({"prompt": "a", "sampling": {"top_p": 2}}, 400, "top_p"),
    ({"prompt": "a", "sampling": {"logit_bias": {"99999999": 1.0}}}, 400, "logit_bias"),
    ({"token_ids": [99_999_999]}, 400, "token"),
    ({"prompt": "a", "model": "gpt-17"}, 404, "gpt-17"),
    ({"token_ids": [5] * 9000}, 413, "context"),
]


@pytest.mark.parametrize(("body", "code", "word"), REFUSED)
async def test_nats_door(bf16: Pipeline, body: dict[str, Any], code: int, word: str) -> None:
    async with bf16.nats() as client:
        for payload in (msgpack.packb(body), json.dumps(body).encode()):
            reply = await client.request("kvrelay.gateway.generate", payload, timeout=2)
            assert reply.headers is not None
            assert int(reply.headers["Nats-Service-Error-Code"]) == code, reply.headers
            assert word in reply.headers["Nats-Service-Error"]
        assert (await collect(client, GOOD))["token_ids"]


async def test_nats_door_refuses_garbage(bf16: Pipeline) -> None:
    nested = b"\x91" * 100_000 + b"\xc0"
    async with bf16.nats() as client:
        for payload in (b"\xc1", b"{", b"[1,2", b"not a message", nested, b"\x80" * 70_000, b"\xdd\xff\xff\xff\xff"):
            reply = await client.request("kvrelay.gateway.generate", payload, timeout=2)
            assert reply.headers is not None and reply.headers["Nats-Service-Error-Code"] == "400", payload[:10]
        assert (await collect(client, GOOD))["token_ids"]


def http_body(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same request as a client of the HTTP API writes it."""
    flat = {**body, **body.get("sampling", {})}
    flat.pop("sampling", None)
    if "token_ids" in flat and "prompt" not in flat:
        flat["prompt"] = flat.pop("token_ids")
    return ("chat/completions" if "messages" in flat else "completions"), flat


@pytest.mark.parametrize(
    ("body", "code", "word"), [case for case in REFUSED if case[0].keys() != {"prompt", "token_ids"}]
)
def test_http_door(bf16: Pipeline, body: dict[str, Any], code: int, word: str) -> None:
    path, flat = http_body(body)
    answer = httpx.post(f"{bf16.url}/v1/{path}", json=flat, timeout=5)
    assert answer.status_code in (code, 400), answer.text
    error = answer.json()["error"]
    assert word in error["message"] or word in str(error["param"]), error
    good = httpx.post(f"{bf16.url}/v1/completions", json={"prompt": "One two", "max_tokens": 2}, timeout=30)
    assert good.status_code == 200


def test_cli_door(bf16: Pipeline) -> None:
    cases = [
        (("generate", "hi", "--temperature", "-1"), 2, "temperature"),
        (("generate", ""), 2, "empty"),
        (("generate", "hi", "--max-tokens", "1000000000"), 1, "max_tokens"),
        (("generate", "word " * 9000, "--raw"), 1, "context"),
        (("generate", "hi", "--max-tokens", "many"), 2, "max-tokens"),
        (("nonsense",), 2, "nonsense"),
    ]
    for arguments, code, word in cases:
        done = bf16.cli(*arguments)
        assert done.returncode in {code, 1 if code == 2 and word in {"temperature", "empty"} else code}, done.stderr
        assert word in done.stderr, (arguments[:2], done.stderr)
        assert "Traceback" not in done.stderr


def test_wrong_nats_password(bf16: Pipeline) -> None:
    url = f"nats://client:wrong@127.0.0.1:{bf16.nats_port}"
    command = [sys.executable, "-m", "services.cli", "generate", "hi", "--nats-url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    assert done.returncode == 1
    assert "password" in done.stderr or "credentials" in done.stderr
    assert "Traceback" not in done.stderr


def refused_up(*options: str, state: Path, env: dict[str, str] | None = None) -> str:
    """Runs `kvrelay up` that must end by itself with exit code 1 and a clear text, which is returned.

    Without a port among the options it takes any free one: somebody else may have the default.
    """
    command = [sys.executable, "-m", "services.cli", "up", "--http-port", "0", "--state-dir", str(state), *options]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, env=environment)
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr + done.stdout


def test_up_refuses_an_unknown_model(tmp_path: Path) -> None:
    assert "no-such-model" in refused_up("--model", "no-such-model", state=tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing")
    assert "broken.gguf" in refused_up("--model", str(broken), state=tmp_path)


@pytest.mark.parametrize("flag", ["--http-port", "--nats-port"])
def test_up_refuses_a_taken_port(tmp_path: Path, flag: str) -> None:
    other = "--nats-port" if flag == "--http-port" else "--http-port"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refused_up(flag, port, other, str(free_port()), state=tmp_path)


def test_up_refuses_a_second_pipeline_on_one_state(bf16: Pipeline) -> None:
    text = refused_up("--http-port", str(free_port()), "--nats-port", str(free_port()), state=bf16.state)
    assert str(bf16.state) in text.replace("\n", "")


def test_up_refuses_a_state_dir_it_cannot_write(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    assert "file" in refused_up(state=blocker / "state")
