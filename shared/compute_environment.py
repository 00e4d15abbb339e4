"""The environment of a process that computes. Imported before torch, which reads it once; must not import torch."""

from __future__ import annotations

import os
import sys

SWITCH_INTERVAL_S = 0.0005


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(threads: int) -> None:
    """OpenMP gets `threads` threads and must not spin: workers share the cores, and one that spins starves the others.

    The interpreter hands the GIL over sooner than by default, so that a step never waits 5 ms for the event loop.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
