"""Everything of one process that waits for something to come back: answers, streams, and signs that a listener is gone.

One subscription (`<inbox>.*`) serves all requests of the process; the last word of a reply subject tells them apart.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

from shared.errors import KvrelayError


class Watch:
    """Tells once that the listener of an exchange is gone. `subject` is the reply subject that finds it out."""

    __slots__ = ("_on_gone", "subject")

    def __init__(self, subject: str, on_gone: Callable[[], None]) -> None:
        self.subject = subject
        self._on_gone: Callable[[], None] | None = on_gone

    def fire(self) -> None:
        """Called when NATS found no listener."""
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()


class Answer:
    """One request on its way. `subject` is where it was sent, `reply` where its answer is to go."""

    __slots__ = ("future", "reply", "subject")

    def __init__(self, subject: str, reply: str, loop: asyncio.AbstractEventLoop) -> None:
        self.subject = subject
        self.reply = reply
        self.future: asyncio.Future[Msg] = loop.create_future()

    def fail(self, error: KvrelayError) -> None:
        """Ends the wait with `error`, unless the answer is there already."""
        if not self.future.done():
            self.future.set_exception(error)


class Inbox:
    """`prefix` is a subject no other process uses."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._tokens = itertools.count()
        self._answers: dict[str, Answer] = {}
        self._watches: dict[str, Watch] = {}
        self._streams: dict[str, tuple[str, Callable[[KvrelayError], None]]] = {}

    @property
    def subject(self) -> str:
        """What to subscribe `on_message` to."""
        return f"{self.prefix}.*"

    def expect(self, subject: str, loop: asyncio.AbstractEventLoop) -> Answer:
        """A request to `subject` is about to leave; `forget` it when it is over."""
        answer = Answer(subject, self._new(), loop)
        self._answers[answer.reply] = answer
        return answer

    def forget(self, answer: Answer) -> None:
        """What still comes for `answer` is ignored."""
        self._answers.pop(answer.reply, None)

    def watch(self, on_gone: Callable[[], None]) -> Watch:
        """Calls `on_gone` once, when a message with this watch as its reply subject found no listener."""
        watch = Watch(self._new(), on_gone)
        self._watches[watch.subject] = watch
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Forgets `watch`."""
        self._watches.pop(watch.subject, None)

    def open_stream(self, subject: str, fail: Callable[[KvrelayError], None]) -> str:
        """An inbox of its own for a stream from `subject`; `fail` ends the stream when the connection breaks."""
        inbox = f"{self.prefix}.stream.{next(self._tokens):x}"
        self._streams[inbox] = (subject, fail)
        return inbox

    def close_stream(self, inbox: str) -> None:
        """Forgets the stream."""
        self._streams.pop(inbox, None)

    async def on_message(self, msg: Msg) -> None:
        """Called by NATS."""
        answer = self._answers.get(msg.subject)
        if answer is not None:
            if not answer.future.done():
                answer.future.set_result(msg)
            return
        watch = self._watches.get(msg.subject)
        if watch is not None:
            watch.fire()

    def fail(self, error: KvrelayError, subject: str | None = None) -> None:
        """Ends every exchange with `error`; only those with `subject`, in any case, if one is given."""
        for answer in list(self._answers.values()):
            if subject is None or answer.subject.lower() == subject.lower():
                answer.fail(error)
        for asked, fail in list(self._streams.values()):
            if subject is None or asked.lower() == subject.lower():
                fail(error)

    def _new(self) -> str:
        return f"{self.prefix}.{next(self._tokens):x}"
