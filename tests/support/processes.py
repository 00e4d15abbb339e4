"""Python in a process of its own, and what /proc says of processes and of those below them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """`python -c code arguments…` in our tree, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def family(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def session(leader: int) -> list[int]:
    """Processes of the session that `leader` began."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) == leader]


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of those that are there."""
    ticks = sum(int(fields[11]) + int(fields[12]) for pid in pids if (fields := _stat(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on (state, parent, group, session …); empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def mappings(pid: int) -> Iterator[tuple[str, dict[str, int]]]:
    """(path, sizes in bytes by kind) of each mapping of a process; the path of anonymous memory is empty."""
    path, sizes = "", dict[str, int]()
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if not head[0].endswith(":"):
            if sizes:
                yield path, sizes
            path, sizes = " ".join(head[5:]), {}
        elif head[-1] == "kB":
            sizes[head[0][:-1]] = int(head[1]) * 1024
    if sizes:
        yield path, sizes
