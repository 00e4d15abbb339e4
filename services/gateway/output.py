"""What flows from the dispatcher to one client: deltas, merged while the client is slow, and one end.

One producer, one consumer, one event loop. Memory is bounded by the answer itself, since deltas are merged.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shared.errors import KvrelayError
from shared.messages import TokenLogprob


@dataclass(slots=True)
class Delta:
    """New text and the tokens it came with; text may lag behind its tokens."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


class Output:
    """The client's end of a request."""

    def __init__(self, streaming: bool) -> None:
        self.streaming = streaming
        self.ended = False
        self._error: KvrelayError | None = None
        self._pending = Delta()
        self._wake = asyncio.Event()

    def push(self, text: str, token_ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Adds what is new. After the end it does nothing."""
        if self.ended:
            return
        pending = self._pending
        pending.text += text
        pending.token_ids += token_ids
        if logprobs is not None:
            pending.logprobs = (pending.logprobs or []) + logprobs
        if self.streaming and pending:
            self._wake.set()

    def end(self, error: KvrelayError | None = None) -> None:
        """Ends the output, once: a second end does nothing."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake.set()

    async def next(self) -> Delta | None:
        """The next delta (in a stream as soon as there is one, otherwise the whole), then None, or the error."""
        await self._wake.wait()
        if self._pending and (self.streaming or self._error is None):
            delta, self._pending = self._pending, Delta()
            if not self.ended:
                self._wake.clear()
            return delta
        if self._error is not None:
            raise self._error
        return None
