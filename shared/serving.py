"""From a message's arrival to its one end: a reply, the end of a stream, or an error. One `Serving` per actor.

A callback of NATS accepts (or refuses), spawns a task and returns, so that no message waits behind another one's work.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from nats.aio.msg import Msg
from opentelemetry import context as otel

from shared import logs, telemetry, wire
from shared.bus import Bus
from shared.call import INTERRUPTED, Call
from shared.clock import Clock
from shared.errors import BadRequest, Busy, Cancelled, Internal, KvrelayError, Timeout, Unavailable
from shared.route import Route

BUSY_RETRY_S = 0.05

log = logs.get()


class Serving:
    """Serves the routes of one actor instance, at most `max_inflight` messages of each at once.

    The limit is per verb, so that a flood of requests does not keep out the cancels that would end it.
    """

    def __init__(self, bus: Bus, instance: str, max_inflight: int, clock: Clock) -> None:
        self.inflight: set[asyncio.Task[None]] = set()
        self.watched: set[Call] = set()
        self._bus = bus
        self._instance = instance
        self._max_inflight = max_inflight
        self._clock = clock

    def receiver(self, route: Route) -> Callable[[Msg], Coroutine[Any, Any, None]]:
        """What to subscribe to the subject of `route`."""
        running: set[asyncio.Task[None]] = set()

        async def accept(msg: Msg) -> None:
            if msg.reply and not self._bus.may_answer(msg.reply):
                route.stats.failed(BadRequest.__name__)
                log.warning("a message with a reply subject that is no inbox is ignored", verb=route.verb)
            elif not route.concurrent:
                await self._serve(route, msg)
            elif len(running) >= self._max_inflight:
                await self._refuse(route, msg)
            else:
                task = asyncio.get_running_loop().create_task(self._serve(route, msg))
                for tasks in (running, self.inflight):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

        return accept

    async def keep_alive(self) -> None:
        """Tells callers that hear nothing else that they are being served, and notices those that are gone."""
        for call in list(self.watched):
            await call.keep_alive()

    async def finished(self) -> None:
        """Returns when nothing is being served."""
        while self.inflight:
            await asyncio.wait(self.inflight)

    async def cancel(self) -> None:
        """Gives up what is being served; the callers are told."""
        for task in self.inflight:
            task.cancel()
        await asyncio.gather(*self.inflight, return_exceptions=True)

    async def _refuse(self, route: Route, msg: Msg) -> None:
        route.stats.failed(Busy.__name__)
        if not msg.reply:
            log.error("mailbox full: a message without reply subject is lost", verb=route.verb)
            return
        busy = Busy(
            f"{self._instance} already serves {self._max_inflight} of {route.span_name}", retry_after_s=BUSY_RETRY_S
        )
        await self._bus.reply_error(msg.reply, busy)

    async def _serve(self, route: Route, msg: Msg) -> None:
        began = self._clock.monotonic()
        context = telemetry.extract(msg.headers)
        span = None
        if route.root:
            span, context = telemetry.start_request(route.span_name, context, route.attributes)
        elif not route.event and telemetry.has_parent(context):
            span, context = telemetry.start_hop(route.span_name, context, route.attributes)
        token = otel.attach(context)
        call = Call(self._bus, msg, context, route.concurrent)
        error: BaseException | None = None
        try:
            await self._run(route, call, wire.decode(msg.data, route.kind))
        except asyncio.CancelledError:
            if not call.client_gone.is_set():
                error = Unavailable(f"{self._instance} is stopping")
            elif call.interrupted:  # perhaps it is not back yet
                error = Unavailable(INTERRUPTED)
            else:
                error = Cancelled("the caller went away")
        except KvrelayError as refused:
            error = refused
        except Exception as fault:
            error = fault
            log.error("handler failed", verb=route.verb, exc_info=fault)
        finally:
            call.close()
            self.watched.discard(call)
            route.stats.served(self._clock.monotonic() - began)
            if error is not None:
                route.stats.failed(type(error).__name__)
            otel.detach(token)
            if span is not None:
                telemetry.end(span, error)
            if error is not None:
                await self._answer_error(call, error)

    async def _run(self, route: Route, call: Call, message: Any) -> None:
        if not route.concurrent:
            await call.answer(route.handler(message, call))
            return
        if call.wants_keepalive:
            call.watch()
            self.watched.add(call)
        limit = asyncio.timeout(call.budget_s)
        try:
            async with limit:
                result = route.handler(message, call)
                if inspect.isawaitable(result):
                    result = await result
                if hasattr(result, "__aiter__"):
                    await _stream(call, result)
                else:
                    await call.answer(result)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Timeout(f"{route.span_name} did not finish within {call.budget_s:g} s") from None

    async def _answer_error(self, call: Call, error: BaseException) -> None:
        if not isinstance(error, KvrelayError):
            where = f" of trace {call.trace_id}" if call.trace_id else ""
            error = Internal(f"internal error in {self._instance}; its log{where} has the details")
        try:
            await call.fail(error)
        except KvrelayError as lost:
            log.warning("an error could not be answered", error=error.text, reason=lost.text)


async def _stream(call: Call, items: Any) -> None:
    """Sends what `items` yields, then the end."""
    call.watch()
    async with aclosing(items):
        async for item in items:
            await call.send(item)
    await call.send(None)
