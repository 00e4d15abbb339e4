"""The one connection of a process to NATS, and the only place that publishes.

Subjects are given without the namespace (`block_manager.acquire`); events and verbs alike get it here. Every message
carries the trace it was sent from, is checked against the server's payload limit, and fails with a typed error:

    nobody serves the subject        Unavailable, at once
    the connection is or gets lost   Unavailable, at once for everything in flight (it may or may not have been served)
    no answer in time                Timeout
    credentials or a permission      Unauthorized
    the other side said so           the error it sent

nats-py keeps publishing into a buffer while it reconnects. We do not: a message that is sent seconds late, when its
caller has given up, does harm. `request` waits for the connection within its own timeout instead.

Streams. `stream` listens on an inbox of its own, and stops listening when its consumer does. The serving side gives
every message of the stream a reply subject of its own (`watch`): nobody answers it, but if the inbox has no listener any
more, because the consumer stopped, died or lost its connection, NATS says "no responders" there. So any NATS client is
covered without doing anything. While a stream is silent, callers that said `kvrelay-keepalive` get a keepalive every
second, which is the same probe; it also tells them that the server lives. A client's host that vanishes without closing
its socket is noticed when the NATS server's own pings fail.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar, overload

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from pydantic import BaseModel

from shared import headers as names
from shared import logs, telemetry, wire
from shared.bus_connection import Connection
from shared.errors import BadRequest, KvrelayError, Timeout, TooLarge, Unavailable

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Msg], Awaitable[None]]

KEEPALIVE_S = 1.0
IDLE_TIMEOUT_S = 10.0
STREAM_BUFFER = 8192
_HEADER_FRAME = 12  # "NATS/1.0\r\n" and the closing "\r\n"

log = logs.get()


class Watch:
    """Tells whether the listener of one exchange is still there. `subject` goes on messages as their reply subject."""

    __slots__ = ("_on_gone", "gone", "subject")

    def __init__(self, subject: str, on_gone: Callable[[], None]) -> None:
        self.subject = subject
        self.gone = False
        self._on_gone = on_gone

    def fire(self, _: Msg) -> None:
        if not self.gone:
            self.gone = True
            self._on_gone()


class Bus:
    """See the module. Made by `connect`; used from one event loop."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.connection = connection
        self.namespace = namespace
        self._nc: Client = connection.client
        self._inbox = ""
        self._tokens = itertools.count()
        self._waiting: dict[str, Callable[[Msg], None]] = {}
        self._pending: dict[object, Callable[[KvrelayError], None]] = {}
        connection.on_lost = self._fail_pending
        connection.on_forbidden = self._fail_forbidden

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        user: str | None = None,
        password: str | None = None,
        name: str = "kvrelay",
        namespace: str = "kvrelay",
        timeout_s: float = 3.0,
    ) -> Bus:
        """Connects once, without retry. Raises Unauthorized (wrong credentials or no right to an inbox) or Unavailable."""
        connection = await Connection.open(url, user=user, password=password, name=name, timeout_s=timeout_s)
        bus = cls(connection, namespace)
        inbox: str = bus._nc.new_inbox()
        bus._inbox = inbox
        try:
            await bus._subscribe(f"{inbox}.*", bus._on_inbox)
        except BaseException:
            await connection.close()
            raise
        return bus

    @property
    def up(self) -> bool:
        """Whether the connection is there now."""
        return self.connection.up

    def subject(self, name: str) -> str:
        """The full subject of `name`; names that begin with `$` or `_INBOX` are full already."""
        return name if name[:1] == "$" or name.startswith("_INBOX") else f"{self.namespace}.{name}"

    async def publish(self, subject: str, message: BaseModel, *, headers: Mapping[str, str] | None = None) -> None:
        """Sends without an answer: delivered at most once, to nobody if nobody listens.

        Raises Unavailable while the connection is down, TooLarge past the server's payload limit.
        """
        await self._send(self.subject(subject), wire.encode(message), dict(headers or ()))

    @overload
    async def request(
        self,
        subject: str,
        message: BaseModel,
        reply_type: type[M],
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> M: ...

    @overload
    async def request(
        self,
        subject: str,
        message: BaseModel,
        reply_type: None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> None: ...

    async def request(
        self,
        subject: str,
        message: BaseModel,
        reply_type: type[M] | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> M | None:
        """One message, one answer. `reply_type` None: an empty answer is enough.

        `watched` is for long work: if this caller is cancelled or dies the serving side learns it and stops, and if the
        serving side dies this caller learns it within `IDLE_TIMEOUT_S`. Raises the errors of the module's table.
        """
        if watched:
            stream = self._exchange(subject, message, IDLE_TIMEOUT_S, timeout_s, headers)
            try:
                async for reply in stream:
                    return wire.decode(reply, reply_type) if reply_type is not None else None
                if reply_type is None:
                    return None
                raise Unavailable(f"{subject} answered without a body")
            finally:
                await stream.aclose()
        reply = await self._ask(subject, message, timeout_s, headers)
        return wire.decode(reply.data, reply_type) if reply_type is not None else None

    async def stream(
        self,
        subject: str,
        message: BaseModel,
        reply_type: type[M],
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[M]:
        """The messages of a streaming handler, in order and without gaps, until its end.

        Raises Unavailable if nothing, not even a keepalive, comes for `idle_timeout_s`, if a message was lost, or if
        this consumer is so slow that `STREAM_BUFFER` messages wait; Timeout after `timeout_s`; and the errors the other
        side sends. Leaving the loop early ends the work on the other side; to have that happen at once and not when the
        generator is collected, use `contextlib.aclosing`.
        """
        exchange = self._exchange(subject, message, idle_timeout_s, timeout_s, headers)
        try:
            async for body in exchange:
                yield wire.decode(body, reply_type)
        finally:
            await exchange.aclose()

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Calls `handler` with each message, one after another: accept, spawn a task, return.

        The handler runs in an empty context, not in the caller's span. Returns once the server has agreed; raises
        Unauthorized if it did not.
        """
        return await self._subscribe(self.subject(subject), handler, queue)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Stops listening after everything the server already sent has been handled."""
        if self.connection.up:
            await subscription.drain()

    async def reply(
        self,
        subject: str,
        message: BaseModel | None,
        encoding: wire.Encoding,
        *,
        watch: Watch | None = None,
        index: int = -1,
    ) -> None:
        """Answers on `subject`. None is an empty body. `index` numbers the messages of a stream."""
        body = wire.encode(message, encoding) if message is not None else b""
        headers = {names.SEQUENCE: str(index)} if index >= 0 else None
        await self._send(subject, body, headers, watch.subject if watch is not None else "", traced=False)

    async def reply_error(self, subject: str, error: KvrelayError, *, index: int = -1) -> None:
        """Ends the exchange on `subject` with `error`."""
        headers = names.from_error(error)
        if index >= 0:
            headers[names.SEQUENCE] = str(index)
        await self._send(subject, b"", headers, traced=False)

    async def reply_json(self, subject: str, body: bytes) -> None:
        """Answers a `$SRV` request, whose form is not ours."""
        await self._send(subject, body, None, traced=False)

    async def keep_alive(self, subject: str, watch: Watch) -> None:
        """Sends one keepalive to a caller that said it ignores them."""
        await self._send(subject, b"", {names.KEEPALIVE: "1"}, watch.subject, traced=False)

    def watch(self, on_gone: Callable[[], None]) -> Watch:
        """Calls `on_gone` once, when a message sent with this watch found no listener. `unwatch` when done."""
        token = format(next(self._tokens), "x")
        watch = Watch(f"{self._inbox}.{token}", on_gone)
        self._waiting[token] = watch.fire
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Forgets `watch`."""
        self._waiting.pop(watch.subject.rpartition(".")[2], None)

    async def close(self) -> None:
        """Sends what is buffered and closes. Everything in flight fails with Unavailable."""
        self._fail_pending(Unavailable("this process is stopping"))
        await self.connection.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _ask(self, subject: str, message: BaseModel, timeout_s: float, headers: Mapping[str, str] | None) -> Msg:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not self.connection.up:
            await self.connection.wait_up(timeout_s)
        full = self.subject(subject)
        answer: asyncio.Future[Msg] = loop.create_future()
        token = format(next(self._tokens), "x")
        self._waiting[token] = lambda msg: answer.done() or answer.set_result(msg)
        self._pending[full, token] = lambda error: answer.done() or answer.set_exception(error)
        timer = loop.call_at(deadline, _expire, answer, subject, timeout_s)
        try:
            out = {names.TIMEOUT_MS: str(max(1, round((deadline - loop.time()) * 1000))), **(headers or {})}
            await self._send(full, wire.encode(message), out, f"{self._inbox}.{token}")
            reply = await answer
        finally:
            timer.cancel()
            del self._waiting[token], self._pending[full, token]
        _raise_error(reply, subject)
        return reply

    async def _exchange(
        self,
        subject: str,
        message: BaseModel,
        idle_timeout_s: float,
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[bytes]:
        """The bodies that come back on an inbox of its own."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s if timeout_s is not None else None
        if not self.connection.up:
            await self.connection.wait_up(min(idle_timeout_s, timeout_s or idle_timeout_s))
        full = self.subject(subject)
        arrived: asyncio.Queue[Msg | KvrelayError] = asyncio.Queue()

        async def on_message(msg: Msg) -> None:
            if arrived.qsize() < STREAM_BUFFER:
                arrived.put_nowait(msg)
            elif arrived.qsize() == STREAM_BUFFER:
                arrived.put_nowait(Unavailable("this consumer is too slow; messages of the stream were lost"))

        inbox: str = self._nc.new_inbox()
        subscription = await self._subscribe(inbox, on_message, settle=False)
        self._pending[full, inbox] = arrived.put_nowait
        try:
            out = {names.KEEPALIVE: "1", **(headers or {})}
            if timeout_s is not None:
                out[names.TIMEOUT_MS] = str(max(1, round(timeout_s * 1000)))
            await self._send(full, wire.encode(message), out, inbox)
            expected = 0
            while True:
                item = await _next(arrived, subject, idle_timeout_s, deadline, timeout_s)
                if isinstance(item, KvrelayError):
                    raise item
                if item.headers:
                    if names.KEEPALIVE in item.headers:
                        continue
                    _raise_error(item, subject)
                    sequence = names.get(item.headers, names.SEQUENCE)
                    if sequence is not None and sequence != str(expected):
                        raise Unavailable(f"message {expected} of the stream from {subject} was lost")
                if not item.data:
                    return
                expected += 1
                yield item.data
        finally:
            del self._pending[full, inbox]
            await self.connection.forget(subscription)

    async def _subscribe(self, full: str, handler: Handler, queue: str = "", *, settle: bool = True) -> Subscription:
        subscribing = self._nc.subscribe(full, queue=queue, cb=handler)
        task = asyncio.get_running_loop().create_task(subscribing, context=contextvars.Context())
        subscription = await task
        if settle:
            await self.connection.settle(full)
        return subscription

    async def _send(
        self, full: str, body: bytes, headers: dict[str, str] | None, reply: str = "", *, traced: bool = True
    ) -> None:
        if not self.connection.up:
            raise Unavailable("the connection to NATS is down")
        if traced:
            headers = headers if headers is not None else {}
            telemetry.inject(headers)
        size = len(body) + (sum(len(k) + len(v) + 4 for k, v in headers.items()) + _HEADER_FRAME if headers else 0)
        if size > self._nc.max_payload:
            raise TooLarge(f"a message of {size} bytes to {full} is over the server's limit of {self._nc.max_payload}")
        try:
            await self._nc.publish(full, body, reply, headers or None)
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            raise Unavailable("the connection to NATS is closed") from error
        except (nats.errors.OutboundBufferLimitError, nats.errors.MaxPayloadError) as error:
            raise Unavailable("the connection to NATS is down") from error
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise BadRequest(f"not a subject NATS accepts: {full!r}") from error

    async def _on_inbox(self, msg: Msg) -> None:
        waiting = self._waiting.get(msg.subject[len(self._inbox) + 1 :])
        if waiting is not None:
            waiting(msg)

    def _fail_pending(self, error: KvrelayError) -> None:
        for fail in list(self._pending.values()):
            fail(error)

    def _fail_forbidden(self, full: str, error: KvrelayError) -> None:
        for key, fail in list(self._pending.items()):
            if isinstance(key, tuple) and key[0] == full:
                fail(error)


def _expire(answer: asyncio.Future[Msg], subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(Timeout(f"{subject} did not answer within {timeout_s:g} s"))


def _raise_error(msg: Msg, subject: str) -> None:
    """Raises what the headers of an answer say, if it is an error."""
    if not msg.headers:
        return
    if msg.headers.get(names.STATUS) == names.NO_RESPONDERS and not msg.data:
        raise Unavailable(f"nobody serves {subject} now")
    error = names.to_error(msg.headers)
    if error is not None:
        raise error


async def _next(
    arrived: asyncio.Queue[Msg | KvrelayError],
    subject: str,
    idle_timeout_s: float,
    deadline: float | None,
    timeout_s: float | None,
) -> Msg | KvrelayError:
    """The next item, or Unavailable after a silence, or Timeout at the deadline."""
    if not arrived.empty():
        return arrived.get_nowait()
    now = asyncio.get_running_loop().time()
    limit = now + idle_timeout_s if deadline is None else min(deadline, now + idle_timeout_s)
    try:
        async with asyncio.timeout_at(limit):
            return await arrived.get()
    except TimeoutError:
        if limit == deadline:
            raise Timeout(f"{subject} did not finish within {timeout_s:g} s") from None
        raise Unavailable(f"{subject} has been silent for {idle_timeout_s:g} s") from None
