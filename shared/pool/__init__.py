"""Pools of KV pages and tails in memory that several processes share."""

from __future__ import annotations

from importlib import import_module

from shared.messages import PoolDescription
from shared.pool.base import Pool

__all__ = ["Pool", "attach"]


def attach(description: PoolDescription) -> Pool:
    """Maps a pool of another process.

    Raises Stale if its memory is gone or of another incarnation, Conflict if its geometry is not the described one.
    """
    pool: Pool = import_module(f"shared.pool.{description.kind}").attach(description)
    return pool
