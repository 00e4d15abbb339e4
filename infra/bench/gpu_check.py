"""`make gpu-check`: at most ten minutes on one NVIDIA GPU. Judges every Triton kernel by the reference, measures decode
attention, shared pages and sealing against the GPU's own copy bandwidth, and serves requests with prefill and decode as
two processes that share the block manager's memory on the GPU, or have it copied.

Every part runs even if another fails. The result is printed, and appended to `docs/gpu.md` unless --no-record is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.bench.gpu_pipeline import Wrong, pipelines
from infra.bench.report import Row, machine, table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "gpu.md"
NOT_YET = "**No GPU has run any of this yet.**"
"""What `docs/gpu.md` says until the first record."""
LIMIT_S = 600.0
CASES_LIMIT_S = 240.0


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
            f"{sys.executable} -m pip install --force-reinstall torch==2.13.0 triton==3.9.0"
        )
    return "torch finds no NVIDIA GPU: is there a driver (`nvidia-smi`), and is CUDA_VISIBLE_DEVICES right?"


def cases() -> list[Row]:
    """All of `tests/gpu` on this GPU: each file in a process of its own, since most of the time goes into compiling."""
    given = os.environ | {"TRITON_INTERPRET": "0"}
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file.relative_to(ROOT))],
            cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for file in files
    ]  # fmt: skip
    rows: list[Row] = []
    failed, deadline = 0, time.monotonic() + CASES_LIMIT_S
    for file, process in zip(files, running, strict=True):
        try:
            lines = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            lines = [*process.communicate()[0].strip().splitlines(), f"not done after {CASES_LIMIT_S:.0f} s"]
        failed += process.returncode != 0
        rows += [{"case": line.removeprefix("FAILED ")[:150]} for line in lines if line.startswith(("FAILED", "ERROR"))]
        rows.append({"case": f"{file.name}: {lines[-1] if lines else 'no output'}"})
    if failed:
        raise Wrong(f"{failed} of {len(files)} files failed: run `python -m pytest tests/gpu`", rows)
    return rows


def run_section(name: str, work: Callable[[], list[Row]]) -> Section:
    """Carries one part out, whatever becomes of it."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    section, started = Section(name), time.monotonic()
    try:
        section.rows = work()
    except Wrong as wrong:
        section.rows, section.error = wrong.rows, str(wrong)
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
    """The result as it is kept."""
    head = [f"## {facts['gpu']}, {facts['date']}", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    return "\n".join([*head, *map(record_of, sections)])


def record_of(section: Section) -> str:
    """One part as it is printed and kept."""
    verdict = "passed" if section.passed else section.error or "below target"
    lines = [f"### {section.name}: {verdict} ({section.seconds:.0f} s)", ""]
    if section.rows:
        lines += ["```", table(section.rows), "```", ""]
    return "\n".join(lines)


def until(deadline: float, rows: Iterator[Row]) -> list[Row]:
    """All `rows`. Wrong, with those there are, if some are still missing at `deadline` (by the monotonic clock)."""
    done: list[Row] = []
    for row in rows:
        done.append(row)
        if time.monotonic() > deadline:
            raise Wrong(f"stopped at the limit of {LIMIT_S:.0f} s; this is what there was time for", done)
    return done


def check(quick: bool) -> Iterator[Section]:
    """All parts, right results first; their limits leave two minutes for the measurements, which stop at LIMIT_S."""
    import torch

    from infra.bench import gpu_sections as gpu

    bandwidth, deadline = float("nan"), time.monotonic() + LIMIT_S

    def copies() -> list[Row]:
        nonlocal bandwidth
        bandwidth = gpu.copy_bandwidth()
        return [{"copy GB/s (read + write)": bandwidth / 1e9}]

    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("copy bandwidth", copies),
        ("every kernel against the reference", cases),
        ("pipelines through CUDA IPC", lambda: pipelines(torch.cuda.device_count())),
        ("decode attention", lambda: until(deadline, gpu.decode_attention(bandwidth, quick))),
        ("decode over shared pages", lambda: until(deadline, gpu.shared_prefix(bandwidth, quick))),
        ("sealing 4,096 tokens of a layer", lambda: until(deadline, gpu.sealing(bandwidth))),
    ]
    for name, work in parts:
        yield run_section(name, work)


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
    kept = RECORD.read_text().replace(NOT_YET, "").rstrip() if RECORD.exists() else ""
    sections: list[Section] = []
    for section in check(chosen.quick):  # kept and shown at once: whoever lends the machine may take it back
        sections.append(section)
        if not chosen.no_record:
            RECORD.write_text(f"{kept}\n\n{record(facts, sections)}")
        if not chosen.json:
            print(record_of(section), flush=True)
    total = time.monotonic() - started
    if chosen.json:
        parts = [{"name": s.name, "passed": s.passed, "error": s.error, "rows": s.rows} for s in sections]
        json.dump({"machine": facts, "seconds": total, "sections": parts}, sys.stdout, indent=1)
        print()
    else:
        print(f"{sum(s.passed for s in sections)} of {len(sections)} parts passed in {total:.0f} s of {LIMIT_S:.0f} s")
    return 0 if all(section.passed for section in sections) else 1


if __name__ == "__main__":
    sys.exit(main())
