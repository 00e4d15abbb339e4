"""What a process may use of the machine, and how it does. Imported before torch, which reads the environment once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

SWITCH_INTERVAL_S = 0.0005
_CGROUP: Final = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes this process may still take: what the kernel says is available, or what is left of the container's limit.

    Raises OSError where there is no /proc/meminfo.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))


def prepare(threads: int) -> None:
    """OpenMP gets `threads` threads and must not spin: workers share the cores, and one that spins starves the others.

    The interpreter hands the GIL over sooner than by default, so that a step never waits 5 ms for the event loop.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
