"""Picks a backend: triton -> cpu -> reference, or exactly the one asked for.

A backend is a package `kernels/<backend>/`; an op is a function in one of its files, of the same name and signature in
every backend. Only the automatic choice falls back; an explicit one that cannot be met raises `BackendUnavailable`.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

log = logging.getLogger(__name__)

FILES = {"seal_tails": "seal", "append_tails": "tails", "copy_pages": "gather"}
"""File stem of the ops whose file is not named after them."""
BACKENDS = ("triton", "cpu", "reference")


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot run here; the text says why."""


class Ops:
    """The ops of one backend as attributes; see `kernels/reference/<file>.py` for signatures and contracts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)
        file = f"kernels.{self.name}.{FILES.get(op, op)}"
        try:
            module = importlib.import_module(file)
        except ModuleNotFoundError as missing:
            if missing.name != file:
                raise
            raise BackendUnavailable(f"backend {self.name!r} has no op {op!r}") from None
        found: Callable[..., Any] = getattr(module, op)
        setattr(self, op, found)
        return found

    def __repr__(self) -> str:
        return f"Ops({self.name!r})"


def reference_ops() -> Ops:
    """The reference, which runs on every device."""
    return Ops("reference")


def _why_not(backend: str, device: str) -> str:
    """Why `backend` cannot work on memory of `device` here, or the empty string."""
    if backend == "triton":
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the pool is not on a GPU"
        if device == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device (a CPU build of torch, or no driver)"
        try:
            importlib.import_module("triton")
        except ImportError as error:
            return f"triton cannot be imported: {error}"
    if backend == "cpu":
        if device != "cpu":
            return "the pool is on a GPU"
        from kernels.cpu import build

        try:
            build.load()
        except (build.BuildError, OSError) as error:
            return f"native kernels cannot be built: {error}"
    return ""


@cache
def select(name: str = "auto", device: str = "cpu") -> Ops:
    """The ops of backend `name` for memory on `device` ("cpu" or "cuda").

    "auto" takes the first of `BACKENDS` that can run here and says so once; in Triton's interpreter never triton.
    Raises ValueError for an unknown name, BackendUnavailable with the reason if a named backend cannot run here.
    """
    if name == "auto":
        reasons: list[str] = []
        for backend in BACKENDS if device == "cuda" else BACKENDS[1:]:
            reason = _why_not(backend, device)
            if not reason:
                slow = backend == "reference"  # orders of magnitude: nobody should have to guess why
                because = f" ({'; '.join(reasons)})" if reasons else ""
                log.log(logging.WARNING if slow else logging.INFO, "kernels: %s%s", backend, because)
                return Ops(backend)
            reasons.append(f"{backend}: {reason}")
    if name not in BACKENDS:
        raise ValueError(f"kernels must be auto, {', '.join(BACKENDS)}; not {name!r}")
    if reason := _why_not(name, device):
        raise BackendUnavailable(f"kernels={name}: {reason}")
    return Ops(name)
