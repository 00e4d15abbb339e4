"""One message being served: what a handler may know of it, and the one way it ends.

After an interruption of the connection callers come back seconds later than we do (nats-py waits for two), and what is
sent before is lost. So the end of an exchange that was interrupted is sent again until NATS finds a listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nats.aio.msg import Msg
from opentelemetry import context as otel
from opentelemetry import trace
from pydantic import BaseModel

from shared import headers, wire
from shared.bus import Bus
from shared.bus_inbox import Watch
from shared.errors import KvrelayError, Unavailable

INTERRUPTED = "the connection to NATS was interrupted; some of the answer may be lost"
RETURN_S = 10.0
"""A caller that is not back so long after an interruption is gone."""
RETURN_RETRY_S = 0.25


class Call:
    """Given to handlers beside the body. The span of this hop is the current one while the handler runs."""

    def __init__(self, bus: Bus, msg: Msg, context: otel.Context, concurrent: bool) -> None:
        """`concurrent`: nobody else's message waits until this one is answered."""
        self.headers: Mapping[str, str] = msg.headers or {}
        self.context = context
        self.subject: str = msg.subject
        self.encoding: wire.Encoding = wire.encoding_of(msg.data)
        self.budget_s = headers.timeout_s(msg.headers)
        """For how long the caller waits; None: it did not say."""
        self.client_gone = asyncio.Event()
        """Set when the caller stopped listening, died or lost its connection; the base cancels the handler, too.

        Noticed on the next message of a stream, and within about a second between them for callers that said
        `kvrelay-keepalive` (our own bus does, in `stream` and in watched requests).
        """
        self._bus = bus
        self._concurrent = concurrent
        self._reply: str = msg.reply
        self._watch: Watch | None = None
        self._task: asyncio.Task[Any] | None = None
        self._sent: int | None = None
        self._quiet = True
        self._interruptions = bus.connection.interruptions

    @property
    def interrupted(self) -> bool:
        """Whether the connection to NATS has been lost since the message came: what was sent may not have arrived."""
        return not self._bus.up or self._bus.connection.interruptions != self._interruptions

    @property
    def _may_return(self) -> bool:
        """Whether the caller may be on its way back for the end. Who knows keepalives has given it up already."""
        return self._concurrent and self.interrupted and not self.wants_keepalive

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
        """One message of a stream; None ends it. Unavailable if the caller may have missed earlier ones."""
        if self._sent is not None and self.interrupted:
            raise Unavailable(INTERRUPTED)
        if self._reply and not self.client_gone.is_set():
            self._quiet = False
            index = self._sent or 0
            self._sent = index + 1
            await self._bus.reply(self._reply, message, self.encoding, watch=self._watch, index=index)

    async def answer(self, message: BaseModel | None) -> None:
        """The only answer; None is an empty one."""
        if self._reply:
            await self._end(lambda watch: self._bus.reply(self._reply, message, self.encoding, watch=watch))

    async def fail(self, error: KvrelayError) -> None:
        """Ends the call with an error, whether or not a stream has begun."""
        if self._reply and (self._may_return or not self.client_gone.is_set()):
            await self._end(lambda watch: self._bus.reply_error(self._reply, error, watch=watch, index=self._sent))

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

    async def _end(self, send: Callable[[Watch | None], Awaitable[None]]) -> None:
        """Sends the end; to a caller that may be on its way back, until somebody listens."""
        if not self._may_return:
            await send(None)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETURN_S
        while (left := deadline - loop.time()) > 0:
            await self._bus.connection.wait_up(left)
            unheard = asyncio.Event()
            watch = self._bus.watch(unheard.set)
            try:
                await send(watch)
                async with asyncio.timeout(RETURN_RETRY_S):
                    await unheard.wait()
            except TimeoutError:
                return
            finally:
                self._bus.unwatch(watch)
            await asyncio.sleep(RETURN_RETRY_S)
