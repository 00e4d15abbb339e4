"""The socket below the bus: fails fast at first, reconnects for ever later, and turns nats-py's callbacks into facts.

nats-py tells permissions and overflows only to its error callback: a forbidden subscribe returns a subscription, a
forbidden publish nothing at all. Here they become `violations`, which readiness and `settle` look at. A forbidden reply
subject is not among them: its caller chose it, and must not be able to make us unready.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared import logs
from shared.errors import BadRequest, KvrelayError, Unauthorized, Unavailable

RECONNECT_WAIT_S = 0.1
SETTLE_TIMEOUT_S = 5
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')

Handler = Callable[[Msg], Awaitable[None]]

log = logs.get()


class Connection:
    """One NATS connection. `failure` is set when it is lost for good; `closed` wakes whoever must end then."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.client = Client()
        self.failure: KvrelayError | None = None
        self.closed = asyncio.Event()
        self.violations: dict[str, Unauthorized] = {}
        self.on_lost: Callable[[KvrelayError], None] = lambda error: None
        self.on_forbidden: Callable[[KvrelayError, str], None] = lambda error, subject: None
        self._up = asyncio.Event()
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._first_error: asyncio.Future[Exception] | None = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, url: str, *, user: str | None, password: str | None, name: str, namespace: str, timeout_s: float
    ) -> Connection:
        """Connects once. Raises Unauthorized or Unavailable; afterwards a lost connection comes back by itself."""
        connection = cls(namespace)
        await connection._connect(url, user, password, name, timeout_s)
        return connection

    @property
    def up(self) -> bool:
        """Whether messages can be sent now."""
        return bool(self.client.is_connected)

    @property
    def interruptions(self) -> int:
        """How often the connection was lost and came back."""
        return int(self.client.stats["reconnects"])

    async def wait_up(self, timeout_s: float) -> None:
        """Returns when the connection is there. Raises Unavailable after `timeout_s`, or why it never will be."""
        if not self.up and not self.closed.is_set():
            self._up.clear()  # nats-py knows of a loss some time before it tells
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise Unavailable(f"the connection to NATS has been down for {timeout_s:g} s") from None
        if self.failure is not None:
            raise self.failure

    async def settle(self, subject: str) -> None:
        """Waits until the server has judged the subscription to `subject`; raises Unauthorized if it forbade it."""
        try:
            await self.client.flush(SETTLE_TIMEOUT_S)
        except (nats.errors.Error, TimeoutError) as error:
            raise Unavailable("NATS did not answer") from error
        forbidden = self.violations.get(f"subscription to {subject.lower()}")
        if forbidden is not None:
            raise forbidden

    async def listen(self, full: str, handler: Handler, queue: str = "") -> Subscription:
        """Calls `handler` with each message to `full`, in an empty context. Whether NATS allows it is for `settle`."""
        # nats-py's loop runs handlers in the context of whoever subscribed: a span there would adopt every message
        subscribing = self.client.subscribe(full, queue=queue, cb=handler)
        try:
            return await asyncio.get_running_loop().create_task(subscribing, context=contextvars.Context())
        except nats.errors.BadSubjectError as error:
            raise BadRequest(f"not a subject NATS accepts: {full!r}") from error
        except nats.errors.Error as error:
            raise Unavailable("the connection to NATS is closed") from error

    async def finish(self, subscription: Subscription) -> None:
        """Stops listening after what the server has already sent is handled. Harmless on a lost connection."""
        try:
            await subscription.drain()
        except (nats.errors.Error, TimeoutError):
            log.debug("drain on a lost connection", subject=subscription.subject)

    async def forget(self, subscription: Subscription) -> None:
        """Stops listening at once; what is on its way is dropped. Harmless on a lost connection."""
        try:
            await subscription.unsubscribe()
        except nats.errors.Error:
            log.debug("unsubscribe on a closed connection", subject=subscription.subject)

    async def close(self) -> None:
        """Sends what is buffered, then closes."""
        self._closing = True
        if self.up:
            try:
                await self.client.flush(2)
            except (nats.errors.Error, TimeoutError):
                log.warning("the last messages may not have reached NATS")
        await self.client.close()

    async def _connect(self, url: str, user: str | None, password: str | None, name: str, timeout_s: float) -> None:
        first_error = self._first_error
        assert first_error is not None
        connecting = asyncio.ensure_future(
            self.client.connect(
                servers=[url],
                user=user,
                password=password,
                name=name,
                connect_timeout=max(1, round(timeout_s)),
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # nats-py sleeps on it as it is
                ping_interval=10,
                max_outstanding_pings=2,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
            )
        )
        await asyncio.wait({connecting, first_error}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self._first_error = None
        if connecting.done() and connecting.exception() is None:
            self._up.set()
            return
        self._closing = True
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await self.client.close()
        cause = first_error.result() if first_error.done() else None
        if cause is not None and _is_auth(cause):
            whom = (
                f"the credentials of user {user!r}" if user else "a client without user: nats://USER:PASSWORD@HOST:PORT"
            )
            raise Unauthorized(f"NATS at {_safe(url)} refused {whom}")
        raise Unavailable(f"cannot reach NATS at {_safe(url)}: {cause or 'no answer'}")

    async def _on_error(self, error: Exception) -> None:
        if self._first_error is not None:
            if not self._first_error.done():
                self._first_error.set_result(error)
            return
        violation = _VIOLATION.search(str(error).lower())
        if violation is not None:
            verb, subject = violation.groups()
            refused = Unauthorized(f"NATS forbids this user the {verb} to {subject}")
            log.error("NATS permission missing", what=verb, subject=subject)
            if verb == "subscription" or subject.startswith(f"{self.namespace.lower()}."):
                self.violations[f"{verb} to {subject}"] = refused
            self.on_forbidden(refused, subject)
        elif isinstance(error, nats.errors.SlowConsumerError):
            log.error("messages lost: a subscription's queue is full", subject=error.subject)
        elif _is_auth(error):
            self.failure = Unauthorized("NATS no longer accepts these credentials")
            log.error("NATS refused the credentials; giving up")
            self._ending = asyncio.get_running_loop().create_task(self.client.close())
        elif isinstance(error, (nats.errors.Error, OSError, TimeoutError)):
            log.debug("NATS connection", error=str(error))
        else:
            log.error("error in a message handler", exc_info=error)

    async def _on_disconnected(self) -> None:
        self._up.clear()
        if not self._closing:
            log.warning("NATS connection lost; reconnecting")
        self.on_lost(Unavailable("the connection to NATS was lost; the message may or may not have been served"))

    async def _on_reconnected(self) -> None:
        self._up.set()
        log.info("NATS connection is back")

    async def _on_closed(self) -> None:
        if not self._closing and self.failure is None:
            last = self.client.last_error
            auth = last is not None and _is_auth(last)
            self.failure = (
                Unauthorized("NATS refused the credentials") if auth else Unavailable("NATS closed the connection")
            )
        self._up.set()
        self.closed.set()


def _is_auth(error: Exception) -> bool:
    return isinstance(error, nats.errors.AuthorizationError) or "authorization" in str(error).lower()


def _safe(url: str) -> str:
    """`url` without credentials."""
    scheme, _, rest = url.rpartition("://")
    return f"{scheme or 'nats'}://{rest.rpartition('@')[2]}"
