"""What every benchmark prints: the machine it ran on, a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, str | int | float | None]


def machine() -> dict[str, str | int | float]:
    """CPU, cores, memory, load and versions: enough to judge whether two results may be compared."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        memory = 0.0
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(memory, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def table(rows: Sequence[Row]) -> str:
    """Rows of equal keys as aligned columns; numbers right, text left."""
    if not rows:
        return "(nothing measured)"
    names = list(rows[0])
    cells = [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    numeric = [all(not isinstance(row[name], str) for row in rows) for name in names]

    def line(parts: Sequence[str]) -> str:
        padded = (p.rjust(w) if n else p.ljust(w) for p, w, n in zip(parts, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(names), line(["-" * w for w in widths]), *map(line, cells)])


def show(title: str, rows: Sequence[Row], *, as_json: bool, notes: dict[str, Any] | None = None) -> None:
    """Prints one benchmark's result to stdout. `notes` are figures of the run as a whole."""
    where = machine()
    if as_json:
        json.dump({"benchmark": title, "machine": where, **(notes or {}), "rows": list(rows)}, sys.stdout, indent=1)
        print()
        return
    print(f"{title}\n" + ", ".join(f"{k} {v}" for k, v in {**where, **(notes or {})}.items()))
    print(table(rows))


def best_seconds(run: Callable[[], object], *, budget_s: float = 0.5, least: int = 5) -> float:
    """Duration of `run` when nothing disturbs it: the 10th percentile of as many runs as fit the budget."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < least or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 10]


def _text(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else value
