"""The receiving end of one exchange with an inbox of its own: a stream, or a request whose caller may vanish."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from shared import headers as names
from shared.errors import KvrelayError, Timeout, Unavailable

STREAM_BUFFER = 8192


class Arrivals:
    """What has arrived on one inbox and is not consumed yet. `subject` is whom we asked, for texts."""

    def __init__(self, subject: str, idle_timeout_s: float, timeout_s: float | None) -> None:
        self._subject = subject
        self._idle_timeout_s = idle_timeout_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s
        self._arrived: asyncio.Queue[Msg | KvrelayError] = asyncio.Queue()
        self._expected = 0

    async def put(self, msg: Msg) -> None:
        """Called by NATS. What does not fit is not dropped silently: the consumer is told that it is too slow."""
        waiting = self._arrived.qsize()
        if waiting < STREAM_BUFFER:
            self._arrived.put_nowait(msg)
        elif waiting == STREAM_BUFFER:
            self.fail(Unavailable(f"{waiting} messages from {self._subject} wait unread; later ones are lost"))

    def fail(self, error: KvrelayError) -> None:
        """Ends the exchange after what has arrived."""
        self._arrived.put_nowait(error)

    async def next(self) -> bytes:
        """The next body; empty at the end.

        Raises the error that ended the exchange, Unavailable after a silence or when a message was lost, Timeout.
        """
        while True:
            item = await self._next_item()
            if isinstance(item, KvrelayError):
                raise item
            if item.headers:
                if names.KEEPALIVE in item.headers:
                    continue
                raise_error(item, self._subject)
                sequence = item.headers.get(names.SEQUENCE)
                if sequence is not None and sequence != str(self._expected):
                    raise Unavailable(f"message {self._expected} of the stream from {self._subject} was lost")
            self._expected += 1
            return item.data

    async def _next_item(self) -> Msg | KvrelayError:
        if not self._arrived.empty():
            return self._arrived.get_nowait()
        limit = self._loop.time() + self._idle_timeout_s
        if self._deadline is not None:
            limit = min(limit, self._deadline)
        try:
            async with asyncio.timeout_at(limit):
                return await self._arrived.get()
        except TimeoutError:
            if limit == self._deadline:
                raise Timeout(f"{self._subject} did not finish within {self._timeout_s:g} s") from None
            raise Unavailable(f"{self._subject} has been silent for {self._idle_timeout_s:g} s") from None


def raise_error(msg: Msg, subject: str) -> None:
    """Raises what the headers of an answer say, if that is an error."""
    if not msg.headers:
        return
    if msg.headers.get(names.STATUS) == names.NO_RESPONDERS and not msg.data:
        raise Unavailable(f"nobody serves {subject} now")
    error = names.to_error(msg.headers)
    if error is not None:
        raise error
