"""The part of `gpu_check` that serves: `kvrelay up` with its workers on one GPU, over one pool and over two."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from infra.bench.report import Row

ROOT = Path(__file__).parents[2]
RUN_LIMIT_S = 150.0
LIMIT_S = 240.0
"""For one pipeline, most of which is compiling kernels the first time, and for all."""
PROMPT = "Write two sentences about rivers."
TOKENS = 64


class Run(NamedTuple):
    """One pipeline. Two pools on the GPU copy every hand-over; with prefill on the CPU, from host memory."""

    prefill_pool: str
    decode_pool: str
    dtype: str
    kv_cache_dtype: str = "auto"


RUNS = (
    Run("cuda0", "cuda0", "float32"),
    Run("cuda0-a", "cuda0-b", "float32"),
    Run("cpu0", "cuda0", "float32"),
    Run("cuda0", "cuda0", "bfloat16"),
    Run("cuda0", "cuda0", "bfloat16", "int8_channel"),
)
"""In float32 rounding does not turn a near-tie, so all these answers must be the same."""
ACROSS = Run("cuda0", "cuda1", "float32")
"""Where there are two GPUs."""


class Wrong(Exception):
    """A part that ran and was not right; `rows` say what it saw."""

    def __init__(self, text: str, rows: list[Row]) -> None:
        super().__init__(text)
        self.rows = rows


def pipelines(gpus: int = 1) -> list[Row]:
    """Greedy answers of each run: the first computed, the others with their prompt in the cache."""
    rows: list[Row] = []
    exact: set[str] = set()
    deadline = time.monotonic() + LIMIT_S
    for run in (*RUNS, ACROSS) if gpus > 1 else RUNS:
        with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-") as folder:
            try:
                left = min(RUN_LIMIT_S, deadline - time.monotonic())
                answers = asyncio.run(asyncio.wait_for(_serve(Path(folder) / "state", run), left))
            except Exception as error:
                raise Wrong(f"{'/'.join(run)}: {type(error).__name__}: {error}", rows) from error
        rows += [answer.row for answer in answers]
        if any(not answer.text for answer in answers):
            raise Wrong("an answer is empty", rows)
        if any(not answer.row["cached tokens"] for answer in answers[1:]):
            raise Wrong("a prompt that was computed before was not found in the cache", rows)
        exact |= {answer.text for answer in answers if run.dtype == "float32"}
    if len(exact) > 1:
        raise Wrong("the same prompt was answered differently in float32", rows)
    return rows


class Answer(NamedTuple):
    text: str
    row: Row


async def _serve(state: Path, run: Run) -> list[Answer]:
    from shared import settings
    from shared.bus import Bus
    from shared.messages import ChatMessage, Generate, Generated, Sampling

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", "--json", "--state-dir", str(state)),
        *("--http-port", "0", "--nats-port", "0", "--dtype", run.dtype, "--kv-cache-dtype", run.kv_cache_dtype),
        *("--prefill-pool", run.prefill_pool, "--decode-pool", run.decode_pool),
        *("--kv-cache-memory-bytes", "1GiB", "--max-model-len", "512"),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        started = time.monotonic()
        async for line in process.stdout:
            if json.loads(line)["event"] == "ready":
                break
        else:
            raise RuntimeError("kvrelay up ended before it was ready; its complaint is above")
        ready_s = time.monotonic() - started
        access = settings.connection(settings.CommonSettings(state_dir=state), "client")
        bus = await Bus.connect(access.url, user=access.user, password=access.password, name="gpu-check")
        message = ChatMessage(role="user", content=PROMPT * 8)
        ask = Generate(messages=[message], max_tokens=TOKENS, sampling=Sampling(temperature=0.0))
        answers = [await bus.request("gateway.generate", ask, Generated, timeout_s=60.0) for _ in range(3)]
        await bus.close()
    finally:
        if process.returncode is None:
            process.terminate()
        rest = asyncio.create_task(process.stdout.read())
        await process.wait()
        await rest
    found: list[Answer] = []
    for number, answer in enumerate(answers, 1):
        assert answer.timings is not None and answer.usage is not None
        row: Row = {
            "prefill": run.prefill_pool, "decode": run.decode_pool, "dtype": run.dtype, "kv": run.kv_cache_dtype,
            "request": number, "ready s": round(ready_s, 1), "cached tokens": answer.usage.cached_tokens,
            "ttft ms": 1000 * answer.timings.ttft_s, "tokens/s": answer.timings.tokens_per_s,
            "answer": " ".join(answer.text[:50].split()),
        }  # fmt: skip
        found.append(Answer(answer.text, row))
    return found
