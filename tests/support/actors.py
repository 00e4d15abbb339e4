"""Actors for tests, started on a bus of their own and drained at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shared.actor import Actor
from shared.bus import Bus
from shared.messages import Message

A = TypeVar("A", bound=Actor)


class Ask(Message):
    """A body for tests."""

    text: str = ""
    count: int = 1


@asynccontextmanager
async def running(kind: type[A], bus: Bus, **settings: Any) -> AsyncIterator[A]:
    """A started actor of `kind`; drained on exit."""
    actor = kind(bus, kind.Settings(**settings))
    await actor.start()
    try:
        yield actor
    finally:
        if bus.up and not actor.draining:
            await actor.drain()
