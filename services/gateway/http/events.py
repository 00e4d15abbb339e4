"""Server-sent events that notice at once when the client has gone, also while there is nothing to send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled, and ClientGone raised, when the client goes first.

    The request's body must have been read: from then on `receive` has nothing but the disconnection to tell.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Content(Protocol):
    """The chunks of an answer; closed by whoever sends them, also if not one could be sent."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def aclose(self) -> None: ...


class EventStream(Response):
    """Sends `content` and closes it, whatever happens."""

    media_type = "text/event-stream"

    def __init__(self, content: Content, headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._content = content
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        except ClientGone:
            return
        finally:
            await self._content.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._content:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
