"""One streamed answer as server-sent events, from its first event to an end that happens exactly once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from services.gateway.answers import Answers, error_body
from services.gateway.http.events import DONE, event
from shared.errors import Cancelled, KvrelayError
from shared.messages import Generated


class Chunks:
    """`first` was taken from `events` already. `close(error)` is called once, whatever happens to the client."""

    def __init__(
        self,
        answers: Answers,
        first: Generated,
        events: AsyncGenerator[Generated, None],
        usage_wanted: bool,
        close: Callable[[KvrelayError | None], None],
    ) -> None:
        self._answers = answers
        self._first = first
        self._events = events
        self._usage_wanted = usage_wanted
        self._close = close
        self._error: KvrelayError | None = Cancelled("the client is gone")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        opening = self._answers.first()
        head = event(opening) if opening is not None else b""
        try:
            upcoming: Generated | None = self._first
            while upcoming is not None:
                chunk = head + self._chunk(upcoming)
                head = b""
                if chunk:
                    yield chunk
                upcoming = await anext(self._events, None)
            self._error = None
            yield DONE
        except KvrelayError as error:
            self._error = error
            yield event(error_body(error)) + DONE

    async def aclose(self) -> None:
        """Ends the request if it is not over; idempotent."""
        await self._events.aclose()
        close, self._close = self._close, lambda _: None
        close(self._error)

    def _chunk(self, upcoming: Generated) -> bytes:
        if upcoming.finish_reason is None:
            body = self._answers.delta(upcoming)
            return event(body) if body is not None else b""
        last = event(self._answers.last(upcoming))
        if self._usage_wanted and upcoming.usage is not None:
            last += event(self._answers.usage(upcoming.usage))
        return last
