"""`make gpu-check`: at most ten minutes on one NVIDIA GPU. Judges every Triton kernel by the reference, measures decode
attention, shared pages and sealing against the GPU's own copy bandwidth, and serves requests with prefill and decode as
two processes that share the block manager's memory on the GPU.

Every part runs even if another fails. The result is printed, and appended to `docs/gpu.md` unless --no-record is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.bench.report import Row, machine, table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "gpu.md"
LIMIT_S = 600.0
CASES_LIMIT_S = 240.0
PIPELINE_LIMIT_S = 120.0
PROMPT = "Write two sentences about rivers."


@dataclass
class Section:
    """The outcome of one part."""

    name: str
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.error and not any(str(row.get("target", "")).startswith("below") for row in self.rows)


def why_not() -> str:
    """What keeps this machine from running the check, or nothing."""
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a CPU build. With an NVIDIA GPU here, install the CUDA build from PyPI: "
            f"{sys.executable} -m pip install --force-reinstall torch==2.13.0 triton"
        )
    return "torch finds no NVIDIA GPU: is there a driver (`nvidia-smi`), and is CUDA_VISIBLE_DEVICES right?"


def cases() -> list[Row]:
    """All of `tests/gpu` on this GPU, in a process of its own."""
    given = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=CASES_LIMIT_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    rows: list[Row] = [{"case": line.removeprefix("FAILED ")[:150]} for line in lines if line.startswith("FAILED")]
    rows.append({"case": lines[-1] if lines else done.stderr[-300:]})
    if done.returncode:
        raise Failed(f"{len(rows) - 1} cases failed: run `python -m pytest tests/gpu`", rows)
    return rows


class Failed(Exception):
    """A part that ran and was not right; `rows` say what it saw."""

    def __init__(self, text: str, rows: list[Row]) -> None:
        super().__init__(text)
        self.rows = rows


def pipeline() -> list[Row]:
    """`kvrelay up` with both workers on pool cuda0; greedy answers in two formats, with and without a cache hit."""
    rows: list[Row] = []
    for name in ("auto", "int8_channel"):
        with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-") as folder:
            rows += asyncio.run(asyncio.wait_for(_serve(Path(folder) / "state", name), PIPELINE_LIMIT_S))
    if any(row["answer"] != rows[0]["answer"] for row in rows if row["kv"] == rows[0]["kv"]):
        raise Failed("the same prompt was answered differently with a cache hit", rows)
    return rows


async def _serve(state: Path, kv_cache_dtype: str) -> list[Row]:
    from shared import settings
    from shared.bus import Bus
    from shared.messages import ChatMessage, Generate, Generated, Sampling

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", "--json", "--state-dir", str(state)),
        *("--http-port", "0", "--nats-port", "0", "--prefill-pool", "cuda0", "--decode-pool", "cuda0"),
        *("--kernels", "triton", "--kv-cache-dtype", kv_cache_dtype, "--kv-cache-memory-bytes", "2GiB"),
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
        ask = Generate(
            messages=[ChatMessage(role="user", content=PROMPT * 8)], max_tokens=64, sampling=Sampling(temperature=0.0)
        )
        answers = [await bus.request("gateway.generate", ask, Generated, timeout_s=60.0) for _ in range(3)]
        await bus.close()
    finally:
        if process.returncode is None:
            process.terminate()
        rest = asyncio.create_task(process.stdout.read())
        await process.wait()
        await rest
    rows: list[Row] = []
    for answer in answers:
        assert answer.timings is not None and answer.usage is not None
        rows.append({
            "kv": kv_cache_dtype, "ready s": round(ready_s, 1), "cached tokens": answer.usage.cached_tokens,
            "ttft ms": 1000 * answer.timings.ttft_s, "tokens/s": answer.timings.tokens_per_s,
            "answer": answer.text[:60],
        })  # fmt: skip
    return rows


def run_section(name: str, work: Callable[[], list[Row]]) -> Section:
    """Carries one part out, whatever becomes of it."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    section, started = Section(name), time.monotonic()
    try:
        section.rows = work()
    except Failed as failed:
        section.rows, section.error = failed.rows, str(failed)
    except Exception as error:
        traceback.print_exc()
        section.error = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    section.seconds = time.monotonic() - started
    return section


def where() -> dict[str, Any]:
    """Machine, GPU and versions."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(smi, capture_output=True, text=True, timeout=20, check=False).stdout.split("\n")[0]
    except OSError:
        driver = "unknown"
    return machine() | {
        "gpu": properties.name, "sm": f"{properties.major}.{properties.minor}",
        "gpu_gib": round(properties.total_memory / 2**30, 1), "multiprocessors": properties.multi_processor_count,
        "driver": driver, "cuda": torch.version.cuda, "triton": metadata.version("triton"),
    }  # fmt: skip


def record(facts: dict[str, Any], sections: list[Section]) -> str:
    """The result as it is printed and kept."""
    lines = [f"## {facts['gpu']}, {facts['date']}", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    for section in sections:
        verdict = "passed" if section.passed else section.error or "below target"
        lines += [f"### {section.name}: {verdict} ({section.seconds:.0f} s)", ""]
        if section.rows:
            lines += ["```", table(section.rows), "```", ""]
    return "\n".join(lines)


def check(quick: bool) -> list[Section]:
    """All parts, in order."""
    from infra.bench import gpu_sections as gpu

    bandwidth = 0.0

    def copies() -> list[Row]:
        nonlocal bandwidth
        bandwidth = gpu.copy_bandwidth()
        return [{"copy GB/s (read + write)": bandwidth / 1e9}]

    sections = [run_section("copy bandwidth", copies)]
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("every kernel against the reference", cases),
        ("decode attention", lambda: list(gpu.decode_attention(bandwidth or float("nan"), quick))),
        ("decode over shared pages", lambda: list(gpu.shared_prefix(bandwidth or float("nan"), quick))),
        ("sealing 4,096 tokens of a layer", lambda: list(gpu.sealing(bandwidth or float("nan")))),
        ("pipeline on one GPU through CUDA IPC", pipeline),
    ]
    return sections + [run_section(name, work) for name, work in parts]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if everything passed and met its target, else 1."""
    parser = argparse.ArgumentParser(prog="python -m infra.bench.gpu_check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="one shape of decode attention, shared pages in bf16 only")
    parser.add_argument("--no-record", action="store_true", help="leave docs/gpu.md alone")
    parser.add_argument(
        "--tune", action="store_true", help="find the fastest tiles and write this GPU's table; no check"
    )
    chosen = parser.parse_args(arguments)
    if reason := why_not():
        print(f"gpu-check cannot run: {reason}", file=sys.stderr)
        return 1
    facts = where()
    if chosen.tune:
        from infra.bench.gpu_sections import tune
        from kernels.triton.tuning import FOLDER, file_stem

        path = FOLDER / f"{file_stem(facts['gpu'])}.json"
        path.write_text(json.dumps(tune(), indent=2) + "\n")
        print(f"wrote {path}")
        return 0
    started = time.monotonic()
    sections = check(chosen.quick)
    text = record(facts, sections)
    total = time.monotonic() - started
    if not chosen.no_record:
        kept = RECORD.read_text().replace(NOT_YET, "") if RECORD.exists() else ""
        RECORD.write_text(f"{kept.rstrip()}\n\n{text}")
    if chosen.json:
        parts = [{"name": s.name, "passed": s.passed, "error": s.error, "rows": s.rows} for s in sections]
        json.dump({"machine": facts, "seconds": total, "sections": parts}, sys.stdout, indent=1)
        print()
    else:
        print(text)
        print(f"{sum(s.passed for s in sections)} of {len(sections)} parts passed in {total:.0f} s of {LIMIT_S:.0f} s")
    return 0 if all(section.passed for section in sections) else 1


NOT_YET = "**No GPU has run any of this yet.**"
"""What `docs/gpu.md` says until the first record."""

if __name__ == "__main__":
    sys.exit(main())
