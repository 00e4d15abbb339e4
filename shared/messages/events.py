"""What everybody may want to know; nobody answers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shared.messages.base import Message


class Heartbeat(Message):
    """`event.actor.heartbeat`: `ready` is progress, not an open port; `details` are numbers for `kvrelay stats`."""

    actor: str
    instance: str
    pid: int
    ready: bool
    draining: bool = False
    reason: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class ActorExited(Message):
    """`event.actor.exited`: the supervisor saw this process end; nobody needs to wait for missing heartbeats."""

    actor: str
    instance: str
    pid: int
    code: int


class PoolFreed(Message):
    """`event.pool.freed`: room appeared after somebody was told Busy."""

    pool: str
    free: int


class PoolCreated(Message):
    """`event.pool.created`: a new incarnation; every older handle of this pool is stale."""

    pool: str
    epoch: int
