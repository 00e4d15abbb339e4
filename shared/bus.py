"""The one connection of a process to NATS, and the only place that publishes.

Subjects are given without the namespace (`block_manager.acquire`, `event.pool.freed`). Every message carries the trace
it was sent from, is checked against the server's payload limit, and fails with a typed error:

    nobody serves the subject        Unavailable, at once
    the connection is or gets lost   Unavailable, at once for everything in flight (it may or may not have been served)
    no answer in time                Timeout
    credentials or a permission      Unauthorized
    the other side said so           the error it sent

nats-py goes on publishing into a buffer while it reconnects. We do not: what leaves seconds late, when its caller has
given up, does harm. `request` waits for the connection, within its own timeout, before it sends.

Who is still listening? A stream, and a `watched` request, has an inbox of its own and stops listening when its consumer
does. The serving side gives every message of a stream a reply subject (`watch`). Nobody ever answers it, but when the
inbox has no listener any more, because the consumer stopped, died or lost its connection, NATS itself says "no
responders" there. So any NATS client is covered without doing anything. Between messages, callers that sent
`kvrelay-keepalive` get a keepalive every second, which is the same probe and tells them that the server lives, too.
A client whose host vanishes without closing its socket is noticed when the NATS server's own pings fail.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from pydantic import BaseModel

from shared import headers as names
from shared import telemetry, wire
from shared.bus_connection import Connection, Handler
from shared.bus_inbox import Inbox, Watch
from shared.bus_stream import Arrivals, raise_error
from shared.errors import BadRequest, KvrelayError, Timeout, TooLarge, Unauthorized, Unavailable

M = TypeVar("M", bound=BaseModel)

KEEPALIVE_S = 1.0
IDLE_TIMEOUT_S = 5.0
DEFAULT_INBOX = "_INBOX"
_HEADER_FRAME = 12  # "NATS/1.0\r\n" and the closing "\r\n"


class Bus:
    """See the module. Made by `connect`; used from one event loop."""

    def __init__(self, connection: Connection, namespace: str, inbox_prefix: str) -> None:
        self.connection = connection
        self.namespace = namespace
        self._nc: Client = connection.client
        self._inbox = Inbox(f"{inbox_prefix}.{secrets.token_hex(11)}")
        connection.on_lost = self._inbox.fail
        connection.on_forbidden = self._inbox.fail

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
        """Connects once, without retry; a connection that is lost later comes back by itself.

        Answers arrive below `_INBOX_<user>`, which other roles may not listen to, or below NATS's common `_INBOX` where
        the user has no inbox of its own. Raises Unauthorized (credentials, or no right to an inbox) or Unavailable.
        """
        connection = await Connection.open(
            url, user=user, password=password, name=name, namespace=namespace, timeout_s=timeout_s
        )
        prefixes = [f"{DEFAULT_INBOX}_{user}", DEFAULT_INBOX] if user is not None else [DEFAULT_INBOX]
        try:
            for prefix in prefixes:
                bus = cls(connection, namespace, prefix)
                if await bus._open_inbox():
                    return bus
            raise Unauthorized(f"NATS gives the user {user!r} no inbox to receive answers in")
        except BaseException:
            await connection.close()
            raise

    @property
    def up(self) -> bool:
        """Whether the connection is there now."""
        return self.connection.up

    @property
    def forbidden(self) -> Unauthorized | None:
        """A permission that this process needs and NATS does not give it."""
        return next(iter(self.connection.violations.values()), None)

    def may_answer(self, reply: str) -> bool:
        """Whether `reply` is an inbox. What is sent there is sent with our rights, so a caller may not name a subject
        of the pipeline or of NATS itself."""
        return bool(reply) and not reply.startswith((f"{self.namespace}.", "$"))

    def subject(self, name: str) -> str:
        """The full subject of `name`. `$SRV…` is a full one already."""
        return name if name[:1] == "$" else f"{self.namespace}.{name}"

    # --- sending ----------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, message: BaseModel, *, headers: Mapping[str, str] | None = None) -> None:
        """Sends without an answer: delivered at most once, to nobody if nobody listens.

        Raises Unavailable while the connection is down, TooLarge past the server's payload limit.
        """
        await self._send(self.subject(subject), wire.encode(message), dict(headers or ()))

    async def request(
        self,
        subject: str,
        message: BaseModel,
        reply_type: type[M],
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> M:
        """One message, one answer; a handler that returns None answers `Empty`.

        `watched` is for long work: if this caller is cancelled or dies, the serving side notices and stops, and if the
        serving side dies, this caller gets Unavailable within `IDLE_TIMEOUT_S`. Errors: see the module.
        """
        if watched:
            async with aclosing(self._exchange(subject, message, IDLE_TIMEOUT_S, timeout_s, headers)) as bodies:
                body = await anext(bodies, b"")
        else:
            body = await self._ask(subject, message, timeout_s, headers)
        return wire.decode(body, reply_type)

    async def stream(
        self,
        subject: str,
        message: BaseModel,
        reply_type: type[M],
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[M, None]:
        """The messages of a streaming handler, in order and without gaps, until its end.

        Raises Unavailable if nothing comes for `idle_timeout_s`, not even a keepalive, if a message was lost, or if so
        many wait unread that later ones would be; Timeout after `timeout_s`; and the errors the other side sends.
        Leaving the loop ends the work on the other side; when the generator is kept in a variable, close it
        (`contextlib.aclosing`) so that this happens at once.
        """
        async with aclosing(self._exchange(subject, message, idle_timeout_s, timeout_s, headers)) as bodies:
            async for body in bodies:
                yield wire.decode(body, reply_type)

    # --- serving ----------------------------------------------------------------------------------------------------

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Calls `handler` with each message, one after another: accept, spawn a task, return.

        The handler runs in an empty context, not in the caller's span. Returns once the server has agreed; raises
        Unauthorized if it did not.
        """
        full = self.subject(subject)
        subscription = await self.connection.listen(full, handler, queue)
        await self.connection.settle(full)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Stops listening, after everything the server has already sent is handled."""
        await self.connection.finish(subscription)

    async def reply(
        self,
        to: str,
        message: BaseModel | None,
        encoding: wire.Encoding,
        *,
        watch: Watch | None = None,
        index: int | None = None,
    ) -> None:
        """Answers on the reply subject `to`. None is an empty body. `index` numbers the messages of a stream."""
        body = wire.encode(message, encoding) if message is not None else b""
        headers = {names.SEQUENCE: str(index)} if index is not None else None
        await self._send(to, body, headers, watch.subject if watch is not None else "", traced=False)

    async def reply_error(
        self, to: str, error: KvrelayError, *, watch: Watch | None = None, index: int | None = None
    ) -> None:
        """Ends the exchange on `to` with `error`."""
        headers = names.from_error(error) | ({names.SEQUENCE: str(index)} if index is not None else {})
        await self._send(to, b"", headers, watch.subject if watch is not None else "", traced=False)

    async def reply_raw(self, to: str, body: bytes) -> None:
        """Answers with a body whose form is not ours (`$SRV`)."""
        await self._send(to, body, None, traced=False)

    async def keep_alive(self, to: str, watch: Watch) -> None:
        """One keepalive, for callers that said they ignore them."""
        await self._send(to, b"", {names.KEEPALIVE: "1"}, watch.subject, traced=False)

    def watch(self, on_gone: Callable[[], None]) -> Watch:
        """Calls `on_gone` once, when a message sent with this watch found no listener. `unwatch` when done."""
        return self._inbox.watch(on_gone)

    def unwatch(self, watch: Watch) -> None:
        """Forgets `watch`."""
        self._inbox.unwatch(watch)

    async def close(self) -> None:
        """Sends what is buffered and closes. Everything in flight fails with Unavailable."""
        self._inbox.fail(Unavailable("this process is stopping"))
        await self.connection.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _open_inbox(self) -> bool:
        """Whether NATS lets this user listen to the bus's inbox."""
        subscription = await self.connection.listen(self._inbox.subject, self._inbox.on_message)
        try:
            await self.connection.settle(self._inbox.subject)
            return True
        except Unauthorized:
            self.connection.violations.clear()
            await self.connection.forget(subscription)
            return False

    async def _ask(
        self, subject: str, message: BaseModel, timeout_s: float, headers: Mapping[str, str] | None
    ) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not self.connection.up:
            await self.connection.wait_up(timeout_s)
        full = self.subject(subject)
        answer = self._inbox.expect(full, loop)
        timer = loop.call_at(deadline, answer.fail, Timeout(f"{subject} did not answer within {timeout_s:g} s"))
        try:
            out = {**_budget(deadline - loop.time()), **(headers or {})}
            await self._send(full, wire.encode(message), out, answer.reply)
            reply = await answer.future
        finally:
            timer.cancel()
            self._inbox.forget(answer)
        raise_error(reply, subject)
        return reply.data

    async def _exchange(
        self,
        subject: str,
        message: BaseModel,
        idle_timeout_s: float,
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncGenerator[bytes, None]:
        """The bodies that come back on an inbox of its own, up to the empty one."""
        arrivals = Arrivals(subject, idle_timeout_s, timeout_s)
        if not self.connection.up:
            await self.connection.wait_up(min(idle_timeout_s, timeout_s or idle_timeout_s))
        full = self.subject(subject)
        inbox = self._inbox.open_stream(full, arrivals.fail)
        subscription = None
        try:
            subscription = await self.connection.listen(inbox, arrivals.put)
            out = {names.KEEPALIVE: "1", **_budget(timeout_s), **(headers or {})}
            await self._send(full, wire.encode(message), out, inbox)
            while body := await arrivals.next():
                yield body
        finally:
            self._inbox.close_stream(inbox)
            if subscription is not None:
                await self.connection.forget(subscription)

    async def _send(
        self, full: str, body: bytes, headers: dict[str, str] | None, reply: str = "", *, traced: bool = True
    ) -> None:
        if not self.connection.up:
            raise Unavailable("the connection to NATS is down")
        if traced and headers is not None:
            telemetry.inject(headers)
        size = len(body) + (sum(len(k) + len(v) + 4 for k, v in headers.items()) + _HEADER_FRAME if headers else 0)
        if size > self._nc.max_payload:
            raise TooLarge(f"a message of {size} bytes to {full} is over the server's limit of {self._nc.max_payload}")
        try:
            await self._nc.publish(full, body, reply, headers or None)
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise BadRequest(f"not a subject or header NATS accepts: {full!r}") from error
        except nats.errors.Error as error:
            raise Unavailable("the connection to NATS is closed") from error


def _budget(seconds: float | None) -> dict[str, str]:
    return {names.TIMEOUT_MS: str(max(1, round(seconds * 1000)))} if seconds is not None else {}
