"""`kvrelay generate` and `stats` against a running pipeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from tests.e2e.pipeline import RUN_LIMIT_S, Pipeline, at_rest, comes_true

PROMPT = "The capital of France is"
GREEDY = ("--raw", "--temperature", "0", "--max-tokens", "12")


def test_json_holds_the_whole_answer(bf16: Pipeline) -> None:
    answer = bf16.generate(PROMPT, *GREEDY)
    assert {"text", "token_ids", "finish_reason", "usage", "request_id", "trace_id", "timings"} <= set(answer)
    assert set(answer["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 12
    assert answer["finish_reason"] == "length"
    assert "Paris" in answer["text"]
    assert len(answer["trace_id"]) == 32 and int(answer["trace_id"], 16)
    assert answer["timings"]["ttft_s"] > 0


def test_streaming_or_not_the_text_is_the_same(bf16: Pipeline) -> None:
    whole = bf16.generate(PROMPT, *GREEDY)["text"]
    for option in ("--stream", "--no-stream"):
        assert bf16.cli("generate", PROMPT, *GREEDY, option).stdout == whole + "\n"
    streamed = bf16.cli("generate", PROMPT, *GREEDY, "--stream", "--json")
    assert json.loads(streamed.stdout)["text"] == whole


def test_the_chat_template_is_applied_unless_raw(bf16: Pipeline) -> None:
    chat = bf16.generate("Hi", "--max-tokens", "2")
    raw = bf16.generate("Hi", "--max-tokens", "2", "--raw")
    system = bf16.generate("Hi", "--max-tokens", "2", "--system", "You are a pirate and speak like one.")
    prompts = [answer["usage"]["prompt_tokens"] for answer in (raw, chat, system)]
    assert prompts[0] == 1 and prompts[1] > 5
    assert prompts[2] != prompts[1]


def test_a_seed_repeats_and_a_stop_string_ends(bf16: Pipeline) -> None:
    options = ("--raw", "--max-tokens", "12", "--temperature", "1.5")
    first, again = (bf16.generate(PROMPT, *options, "--seed", "7")["token_ids"] for _ in range(2))
    assert first == again != bf16.generate(PROMPT, *options, "--seed", "8")["token_ids"]
    stopped = bf16.generate(PROMPT, *GREEDY, "--stop", "Paris")
    assert stopped["finish_reason"] == "stop" and "Paris" not in stopped["text"]


def test_a_salt_keeps_the_cache_apart(bf16: Pipeline) -> None:
    prompt = " ".join(f"item {number}" for number in range(30))
    usage = [
        bf16.generate(prompt, "--raw", "--max-tokens", "1", "--cache-salt", salt)["usage"] for salt in ("a", "b", "a")
    ]
    assert usage[0]["cached_tokens"] == usage[1]["cached_tokens"] == 0
    assert usage[2]["cached_tokens"] >= 32


def test_by_url_with_credentials_and_from_stdin(bf16: Pipeline) -> None:
    user, password = bf16.credentials("client")
    url = f"nats://{user}:{password}@127.0.0.1:{bf16.nats_port}"
    command = [sys.executable, "-m", "services.cli", "generate", "-", *GREEDY, "--no-stream"]
    for environment, options in (({}, ("--nats-url", url)), ({"KVRELAY_NATS_URL": url}, ())):
        done = subprocess.run(
            [*command, *options],
            input=PROMPT,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            env={**os.environ, **environment},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
    stats = subprocess.run(
        [sys.executable, "-m", "services.cli", "stats", "--json", "--nats-url", url],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert len(json.loads(stats.stdout)["actors"]) == 5


def test_ctrl_c_cancels_the_request_and_frees_its_pages(bf16: Pipeline) -> None:
    command = [sys.executable, "-m", "services.cli", "generate", PROMPT, "--raw", "--state-dir", str(bf16.state)]
    process = subprocess.Popen(
        [*command, "--max-tokens", "2000", "--ignore-eos", "--stream"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 1
    assert complaint == b""
    comes_true(lambda: at_rest(bf16), limit_s=10)


def test_tables_for_people(bf16: Pipeline) -> None:
    done = bf16.cli("stats")
    assert done.returncode == 0
    for word in ("cpu0", "free", "cached", "quarantined", "bf16", "block_manager", "ready"):
        assert word in done.stdout
    doctor = json.loads(bf16.cli("doctor", "--json").stdout)
    found = {finding["name"]: finding for finding in doctor["findings"]}
    assert found["pipeline"]["value"] == f"NATS answers at 127.0.0.1:{bf16.nats_port}"
    assert found["KV auto"]["value"].startswith("23,040 bytes per token")
