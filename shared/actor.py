"""The base of every actor: messages in, messages out, and each accepted message ends exactly once.

    class Echo(Actor):
        name = "echo"

        @handles("say", Say)                         # <ns>.echo.say, shared by all instances
        async def say(self, message: Say, call: Call) -> Said: ...

        @handles("stop", Stop, to="instance")        # <ns>.echo.stop.<instance>
        def stop(self, message: Stop, call: Call) -> None: ...

        @listens("event.pool.freed", PoolFreed)
        def freed(self, message: PoolFreed, call: Call) -> None: ...

A handler is a plain function (called at once, in order of arrival; it must be quick), a coroutine (runs beside others),
an async generator, or a coroutine that returns one: a stream, ended by an empty message. At most `max_inflight`
coroutines run; the next message is answered `Busy`. The caller's deadline cancels its handler and is answered
`Timeout`; a caller that vanishes cancels it, too (`Call.client_gone`). What a handler raises travels as error headers:
a KvrelayError as it is, anything else as `Internal` without details.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from opentelemetry import context as otel

from shared import logs, telemetry, wire
from shared.bus import KEEPALIVE_S, Bus
from shared.call import Call
from shared.clock import SYSTEM, Clock
from shared.discovery import Discovery
from shared.errors import Busy, Cancelled, Internal, KvrelayError, Timeout, Unavailable
from shared.messages import Heartbeat
from shared.route import Route, handles, listens, routes_of
from shared.run import new_instance, run_actor
from shared.settings import CommonSettings
from shared.supervision import supervise

__all__ = ["Actor", "Call", "handles", "listens", "run_actor"]

HEARTBEAT_S = 1.0
BUSY_RETRY_S = 0.05


class Actor:
    """See the module. Subclasses set `name` and `Settings`, and override the hooks they need."""

    name: ClassVar[str]
    Settings: ClassVar[type[CommonSettings]] = CommonSettings

    def __init__(self, bus: Bus, settings: Any, clock: Clock = SYSTEM) -> None:
        self.bus = bus
        self.settings = settings
        self.clock = clock
        self.instance: str = settings.instance or new_instance(self.name)
        self.draining = False
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.log = logs.get()
        self._started = False
        self._routes = routes_of(self, self.name, self.instance)
        self._discovery = Discovery(self.name, self.instance, bus.namespace, self._routes)
        self._subscriptions: list[tuple[Route | None, Subscription]] = []
        self._inflight: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._watched: set[Call] = set()

    # --- hooks ------------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Before anything is subscribed: load, attach, connect."""

    async def settle(self) -> None:
        """At drain, after new work is refused: returns when work that outlives its handler is done."""

    async def teardown(self) -> None:
        """Last: close what `setup` opened. The bus still works."""

    def unready(self) -> str:
        """Why this actor cannot serve now, judged by progress; empty: it can."""
        return ""

    def details(self) -> dict[str, Any]:
        """Numbers for `kvrelay stats`, sent with each heartbeat."""
        return {}

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Sets up, subscribes, announces itself. Raises Unauthorized if NATS forbids a subscription."""
        await self.setup()
        for route in self._routes:
            subscription = await self.bus.subscribe(route.subject, self._receiver(route), queue=route.queue)
            self._subscriptions.append((route, subscription))
        for subject in self._discovery.subjects():
            self._subscriptions.append((None, await self.bus.subscribe(subject, self._discover)))
        self._started = True
        self.supervise("heartbeat", self._beat)

    async def drain(self) -> None:
        """Refuses new work, finishes what was accepted (for at most `drain_timeout_s`), then stops.

        Verbs addressed to this instance, and events, keep arriving until accepted work is done: it may need them.
        """
        self.draining = True
        await self._announce()
        await self._unsubscribe(lambda route: route is not None and route.to == "any")
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                while self._inflight:
                    await asyncio.wait(self._inflight)
                await self.settle()
        except TimeoutError:
            self.log.warning("drain timeout: accepted work is given up", calls=len(self._inflight))
        await self._unsubscribe(lambda _: True)
        await _cancel(self._inflight)
        await _cancel(self._background)
        await self.teardown()

    def supervise(self, name: str, factory: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a background loop until the end, made anew when it fails; failing too often ends the process."""
        self.spawn(name, supervise(name, factory, self.clock), fatal=True)

    def spawn(self, name: str, work: Coroutine[Any, Any, None], *, fatal: bool = False) -> asyncio.Task[None]:
        """A task that is kept, logged if it fails, and cancelled at the end. It keeps the caller's trace context."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(lambda done: self._on_background_end(done, fatal))
        return task

    @property
    def reason(self) -> str:
        """Why this actor is not ready; empty: it is."""
        if not self._started:
            return "starting"
        if self.draining:
            return "stopping"
        forbidden = next(iter(self.bus.connection.violations.values()), None)
        return forbidden.text if forbidden is not None else self.unready()

    # --- messages in ------------------------------------------------------------------------------------------------

    def _receiver(self, route: Route) -> Callable[[Msg], Coroutine[Any, Any, None]]:
        async def serve_in_order(msg: Msg) -> None:
            await self._serve(route, msg)

        async def accept(msg: Msg) -> None:
            if len(self._inflight) >= self.settings.max_inflight:
                await self._refuse(route, msg)
                return
            task = asyncio.get_running_loop().create_task(self._serve(route, msg))
            self._inflight.add(task)
            task.add_done_callback(self._inflight.discard)

        return accept if route.concurrent else serve_in_order

    async def _refuse(self, route: Route, msg: Msg) -> None:
        route.stats.failed(Busy.__name__)
        if msg.reply:
            limit = self.settings.max_inflight
            busy = Busy(f"{self.name} already serves {limit} messages", retry_after_s=BUSY_RETRY_S)
            await self.bus.reply_error(msg.reply, busy)
        else:
            self.log.error("mailbox full: a message without reply subject is lost", verb=route.verb)

    async def _serve(self, route: Route, msg: Msg) -> None:
        """One message from its arrival to its one end: a reply, the end of a stream, or an error."""
        began = self.clock.monotonic()
        context = telemetry.extract(msg.headers)
        span = None
        if route.root:
            span, context = telemetry.start_request(route.span_name, context, route.attributes)
        elif telemetry.has_parent(context):
            span, context = telemetry.start_hop(route.span_name, context, route.attributes)
        token = otel.attach(context)
        call = Call(self.bus, msg, context, began)
        error: BaseException | None = None
        try:
            await self._run(route, call, wire.decode(msg.data, route.kind))
        except asyncio.CancelledError:
            gone = call.client_gone.is_set()
            error = Cancelled("the caller went away") if gone else Unavailable(f"{self.instance} is stopping")
        except KvrelayError as refused:
            error = refused
        except Exception as fault:
            error = fault
            self.log.error("handler failed", verb=route.verb, exc_info=fault)
        finally:
            call.close()
            self._watched.discard(call)
            route.stats.served(self.clock.monotonic() - began)
            if error is not None:
                route.stats.failed(type(error).__name__)
                await self._answer_error(call, error)
            otel.detach(token)
            if span is not None:
                telemetry.end(span, error)

    async def _run(self, route: Route, call: Call, message: Any) -> None:
        if not route.concurrent:
            await call.answer(route.handler(message, call))
            return
        if call.wants_keepalive:
            call.watch()
            self._watched.add(call)
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
            raise Timeout(f"{self.name}.{route.verb} did not finish within {call.budget_s:g} s") from None

    async def _answer_error(self, call: Call, error: BaseException) -> None:
        if not isinstance(error, KvrelayError):
            where = f" of trace {call.trace_id}" if call.trace_id else ""
            error = Internal(f"internal error in {self.instance}; its log{where} has the details")
        try:
            await call.fail(error)
        except KvrelayError as lost:
            self.log.warning("an error could not be answered", error=error.text, reason=lost.text)

    # --- messages out -----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            if self.bus.up:
                await self._announce()
                for call in list(self._watched):
                    await call.keep_alive()
            await self.clock.sleep(min(HEARTBEAT_S, KEEPALIVE_S))

    async def _announce(self) -> None:
        reason = self.reason
        beat = Heartbeat(
            actor=self.name,
            instance=self.instance,
            pid=os.getpid(),
            ready=not reason,
            draining=self.draining,
            reason=reason,
            details=self.details(),
        )
        try:
            await self.bus.publish("event.actor.heartbeat", beat)
        except Unavailable as error:
            self.log.debug("no heartbeat sent", reason=error.text)

    async def _discover(self, msg: Msg) -> None:
        if msg.reply:
            await self.bus.reply_raw(msg.reply, self._discovery.answer(msg.subject))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _unsubscribe(self, chosen: Callable[[Route | None], bool]) -> None:
        going = [subscription for route, subscription in self._subscriptions if chosen(route)]
        self._subscriptions = [(route, kept) for route, kept in self._subscriptions if not chosen(route)]
        await asyncio.gather(*(self.bus.unsubscribe(subscription) for subscription in going))

    def _on_background_end(self, task: asyncio.Task[None], fatal: bool) -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        self.log.error("background work failed", work=task.get_name(), exc_info=task.exception())
        if fatal:
            self.failure = task.exception()
            self.failed.set()


async def _stream(call: Call, items: Any) -> None:
    """Sends what `items` yields, then the end."""
    call.watch()
    try:
        async for item in items:
            await call.send(item)
    finally:
        await items.aclose()
    await call.send(None)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    doomed = [task for task in tasks if task is not asyncio.current_task()]
    for task in doomed:
        task.cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
