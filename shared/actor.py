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
coroutines of one verb run; the next message is answered `Busy`. The caller's deadline cancels its handler and is
answered `Timeout`; a caller that vanishes cancels it, too (`Call.client_gone`). What a handler raises travels as error
headers: a KvrelayError as it is, anything else as `Internal` without details.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared import logs
from shared.bus import KEEPALIVE_S, Bus
from shared.call import Call
from shared.clock import SYSTEM, Clock
from shared.discovery import Discovery
from shared.errors import Unavailable
from shared.messages import Heartbeat
from shared.route import Route, handles, listens, routes_of
from shared.run import new_instance, run_actor
from shared.serving import Serving
from shared.settings import CommonSettings
from shared.supervision import supervise

__all__ = ["Actor", "Call", "handles", "listens", "run_actor"]

HEARTBEAT_S = 1.0


class Actor:
    """See the module. Subclasses set `name` and `Settings`, and override the hooks they need.

    What the base keeps for itself has two underscores, so that no subclass overwrites it by accident.
    """

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
        self.serving = Serving(bus, self.instance, settings.max_inflight, clock)
        self.__started = False
        self.__routes = routes_of(self, self.name, self.instance)
        self.__discovery = Discovery(self.name, self.instance, bus.namespace, self.__routes)
        self.__subscriptions: list[tuple[Route | None, Subscription]] = []
        self.__background: set[asyncio.Task[None]] = set()

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
        for route in self.__routes:
            receiver = self.serving.receiver(route)
            self.__subscriptions.append((route, await self.bus.subscribe(route.subject, receiver, queue=route.queue)))
        for subject in self.__discovery.subjects():
            self.__subscriptions.append((None, await self.bus.subscribe(subject, self.__discover)))
        self.__started = True
        self.supervise("heartbeat", self.__beat)

    async def drain(self) -> None:
        """Refuses new work, finishes what was accepted (for at most `drain_timeout_s`), then stops.

        Verbs addressed to this instance, and events, keep arriving until accepted work is done: it may need them.
        """
        self.draining = True
        try:
            await self.announce()
            await self.__unsubscribe(lambda route: route is not None and route.to == "any")
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.serving.finished()
                await self.settle()
        except TimeoutError:
            self.log.warning("drain timeout: accepted work is given up", calls=len(self.serving.inflight))
        finally:
            await self.__unsubscribe(lambda _: True)
            await self.serving.cancel()
            for task in self.__background:
                task.cancel()
            await asyncio.gather(*self.__background, return_exceptions=True)
            await self.teardown()

    def supervise(self, name: str, factory: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a background loop until the end, made anew when it fails; failing too often ends the process."""
        self.__keep(name, supervise(name, factory, self.clock), fatal=True)

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept, logged if it fails, and cancelled at the end. It keeps the caller's trace context."""
        return self.__keep(name, work, fatal=False)

    @property
    def reason(self) -> str:
        """Why this actor is not ready; empty: it is."""
        if not self.__started:
            return "starting"
        if self.draining:
            return "stopping"
        forbidden = self.bus.forbidden
        return forbidden.text if forbidden is not None else self.unready()

    async def announce(self) -> None:
        """One heartbeat now; the base sends one every second."""
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

    # --- the base's own ---------------------------------------------------------------------------------------------

    async def __beat(self) -> None:
        while True:
            if self.bus.up:
                await self.announce()
                await self.serving.keep_alive()
            await self.clock.sleep(min(HEARTBEAT_S, KEEPALIVE_S))

    async def __discover(self, msg: Msg) -> None:
        if self.bus.may_answer(msg.reply):
            await self.bus.reply_raw(msg.reply, self.__discovery.answer(msg.subject))

    async def __unsubscribe(self, chosen: Callable[[Route | None], bool]) -> None:
        going = [subscription for route, subscription in self.__subscriptions if chosen(route)]
        self.__subscriptions = [(route, kept) for route, kept in self.__subscriptions if not chosen(route)]
        await asyncio.gather(*(self.bus.unsubscribe(subscription) for subscription in going))

    def __keep(self, name: str, work: Coroutine[Any, Any, None], *, fatal: bool) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self.__background.discard(task)
            if task.cancelled() or task.exception() is None:
                return
            self.log.error("background work failed", work=name, exc_info=task.exception())
            if fatal:
                self.failure = task.exception()
                self.failed.set()

        task = asyncio.get_running_loop().create_task(work, name=name)
        self.__background.add(task)
        task.add_done_callback(ended)
        return task
