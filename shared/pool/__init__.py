"""Pools of KV pages and tails in memory that several processes share."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Literal

from shared.handles import Layout
from shared.messages import PoolDescription
from shared.pool.base import Pool
from shared.pool.cuda_ipc import index_of

__all__ = ["Pool", "attach", "create", "device_of", "kind_of"]


def kind_of(name: str) -> Literal["shm", "cuda_ipc"]:
    """The kind of memory a pool of this name is in: on a GPU if it is called `cuda<N>` or `cuda<N>-<anything>`."""
    return "shm" if index_of(name) is None else "cuda_ipc"


def device_of(name: str) -> str:
    """Where a pool of this name is, as torch says it: `cpu` or `cuda:<N>`."""
    index = index_of(name)
    return "cpu" if index is None else f"cuda:{index}"


def create(name: str, state_dir: Path | str, layout: Layout, blocks: int, tails: int) -> Pool:
    """Makes the memory of a pool, owned by this process. Raises Misconfigured if that cannot be."""
    pool: Pool = import_module(f"shared.pool.{kind_of(name)}").create(name, state_dir, layout, blocks, tails)
    return pool


def attach(description: PoolDescription) -> Pool:
    """Maps a pool of another process.

    Raises Stale if its memory is gone or of another incarnation, Conflict if its geometry is not the described one.
    """
    pool: Pool = import_module(f"shared.pool.{description.kind}").attach(description)
    return pool
