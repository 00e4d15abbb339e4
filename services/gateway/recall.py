"""Tells workers to stop what nobody waits for. A lost recall does no harm: the next token item asks for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

from shared import errors, logs
from shared.messages import CancelWork, Message, TokenItem

SPACING_S = 1.0  # between two recalls of the same attempt from the same worker
REMEMBERED = 1024


class Publishes(Protocol):
    """What recalling needs of the bus."""

    async def publish(self, subject: str, message: Message) -> None: ...


class Tasks:
    """Tasks that nobody awaits but that must not be collected while they run; what they raise is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._log = logs.get()

    def spawn(self, work: Coroutine[Any, Any, None], context: Context | None = None) -> None:
        """Starts `work`, in a copy of `context` if one is given."""
        task = asyncio.get_running_loop().create_task(work, context=context.copy() if context is not None else None)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._log.error("background work failed", exc_info=fault)


class Recall:
    """Sends `<actor>.cancel.<instance>`."""

    def __init__(self, bus: Publishes, tasks: Tasks, kind_of: Callable[[str], str]) -> None:
        self._bus = bus
        self._tasks = tasks
        self._kind_of = kind_of
        self._told: dict[tuple[str, int, str], float] = {}
        self._log = logs.get()

    def tell(self, worker: str, request_id: str, attempt: int, context: Context | None = None) -> None:
        """Has `worker` drop the attempt."""
        subject = f"{self._kind_of(worker)}.cancel.{worker}"
        self._tasks.spawn(self._send(subject, CancelWork(request_id=request_id, attempt=attempt)), context)

    def stray(self, worker: str, item: TokenItem, now: float) -> None:
        """`worker` sent `item` for an attempt that is over: tell it, but not at every step."""
        key = (item.request_id, item.attempt, worker)
        over = item.finish_reason is not None or item.error is not None
        if over or now - self._told.get(key, -SPACING_S) < SPACING_S:
            return
        if len(self._told) >= REMEMBERED:
            self._told = {known: at for known, at in self._told.items() if now - at < SPACING_S}
        self._told[key] = now
        self.tell(worker, item.request_id, item.attempt)

    async def _send(self, subject: str, message: Message) -> None:
        try:
            await self._bus.publish(subject, message)
        except errors.KvrelayError as error:
            self._log.warning("could not recall work", subject=subject, why=error.text)
