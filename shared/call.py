"""One message being served: what a handler may know of it, and the one way it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from nats.aio.msg import Msg
from opentelemetry import context as otel
from opentelemetry import trace
from pydantic import BaseModel

from shared import headers, wire
from shared.bus import Bus
from shared.bus_inbox import Watch
from shared.errors import KvrelayError


class Call:
    """Given to handlers beside the body. The span of this hop is the current one while the handler runs."""

    def __init__(self, bus: Bus, msg: Msg, context: otel.Context, now: float) -> None:
        self.headers: Mapping[str, str] = msg.headers or {}
        self.context = context
        self.subject: str = msg.subject
        self.encoding: wire.Encoding = wire.encoding_of(msg.data)
        self.budget_s = headers.timeout_s(msg.headers)
        self.deadline = None if self.budget_s is None else now + self.budget_s
        """When the caller stops waiting, on the actor's monotonic clock; None: it did not say."""
        self.client_gone = asyncio.Event()
        """Set when the caller stopped listening, died or lost its connection; the base cancels the handler, too.

        Noticed on the next message of a stream, and within about a second between them for callers that said
        `kvrelay-keepalive` (our own bus does, in `stream` and in watched requests).
        """
        self._bus = bus
        self._reply: str = msg.reply
        self._watch: Watch | None = None
        self._task: asyncio.Task[Any] | None = None
        self._sent: int | None = None
        self._quiet = True

    @property
    def span(self) -> trace.Span:
        """The span of this hop, for attributes."""
        return trace.get_current_span(self.context)

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty outside of a trace."""
        context = self.span.get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else ""

    @property
    def wants_keepalive(self) -> bool:
        """Whether the caller knows keepalives, and so can be watched before anything is sent to it."""
        return bool(self._reply) and headers.get(self.headers, headers.KEEPALIVE) is not None

    def watch(self) -> None:
        """From here on the caller's departure is noticed and cancels the current task."""
        if self._watch is None and self._reply:
            self._task = asyncio.current_task()
            self._watch = self._bus.watch(self._on_gone)

    async def keep_alive(self) -> None:
        """Tells a caller that hears nothing else that it is being served; called every second."""
        if self._quiet and self._watch is not None:
            await self._bus.keep_alive(self._reply, self._watch)
        self._quiet = True

    async def send(self, message: BaseModel | None) -> None:
        """One message of a stream; None ends it."""
        if self._reply and not self.client_gone.is_set():
            self._quiet = False
            index = self._sent or 0
            self._sent = index + 1
            await self._bus.reply(self._reply, message, self.encoding, watch=self._watch, index=index)

    async def answer(self, message: BaseModel | None) -> None:
        """The only answer; None is an empty one."""
        if self._reply:
            await self._bus.reply(self._reply, message, self.encoding)

    async def fail(self, error: KvrelayError) -> None:
        """Ends the call with an error, whether or not a stream has begun."""
        if self._reply and not self.client_gone.is_set():
            await self._bus.reply_error(self._reply, error, index=self._sent)

    def close(self) -> None:
        """Nobody is watched any more."""
        if self._watch is not None:
            self._bus.unwatch(self._watch)
            self._watch = None
        self._task = None

    def _on_gone(self) -> None:
        self.client_gone.set()
        if self._task is not None:
            self._task.cancel()
