"""What both doors call: admit a request, read its answer, give it up."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor

from opentelemetry import context as otel

from services.gateway.dispatch import Dispatcher
from services.gateway.intake import Intake
from services.gateway.live import Live, span_and_context
from services.gateway.metrics import Metrics
from services.gateway.output import Output
from services.gateway.text import Detokenizes, TextStream
from shared import telemetry
from shared.clock import Clock
from shared.errors import Cancelled, KvrelayError, Timeout, Unavailable
from shared.messages import Generate, Generated

DETOKENIZER_CONTEXT = 8  # tokens of the prompt that may hold the beginning of a character


class Service:
    """`intake` is None until the gateway knows its model and its pools; `closing` says whether it drains."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        clock: Clock,
        detokenizer: Callable[[list[int]], Detokenizes],
        closing: Callable[[], bool],
    ) -> None:
        self.dispatcher = dispatcher
        self.intake: Intake | None = None
        self._metrics = metrics
        self._clock = clock
        self._detokenizer = detokenizer
        self._closing = closing
        # one thread, so that many long prompts at once leave the other cores to the workers
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")

    async def open(self, generate: Generate, below: otel.Context, timeout_s: float | None = None) -> Live:
        """Admits a request whose root span is the current one of `below`. Read it with `events` or `whole`.

        `timeout_s` is what the transport said; the request's own, if shorter, counts. Raises any error of `Intake`,
        Busy when the queue is full, Conflict for an id in use, Unavailable while starting or stopping.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        try:
            intake = self._ready()
            intake.check(generate)
            tokens = await self._tokens(intake, generate)
            limits = [limit for limit in (timeout_s, generate.timeout_s) if limit is not None]
            deadline = now + min(limits) if limits else None
            request = intake.admit(
                generate,
                tokens,
                request_id=generate.request_id or uuid.uuid4().hex,
                wall=wall,
                now=now,
                deadline=deadline,
            )
            # what a chat template ends with is no text that an answer continues
            before = [] if generate.messages is not None else tokens[-DETOKENIZER_CONTEXT:]
            text = TextStream(self._detokenizer(before), generate.stop, generate.sampling.min_tokens)
            hidden = frozenset(intake.eos_token_ids) | frozenset(generate.sampling.stop_token_ids)
            live = Live(request, text, Output(generate.stream), *span_and_context(below), hidden)
            live.span.set_attribute(telemetry.REQUEST_ID, request.id)
            self._ready()
            self.dispatcher.submit(live)
        except KvrelayError as error:
            self._metrics.refused(error)
            raise
        if deadline is not None:
            late = Timeout(f"the request was not done within {min(limits):g} s")
            left = max(0.0, deadline - self._clock.monotonic())
            live.timer = asyncio.get_running_loop().call_later(left, self.dispatcher.fail, live, late)
        return live

    async def events(self, live: Live) -> AsyncGenerator[Generated, None]:
        """The stream of an answer: deltas, then the event with `finish_reason`. Leaving it early ends the request."""
        try:
            while (delta := await live.output.next()) is not None:
                yield Generated(
                    request_id=live.request.id,
                    trace_id=live.trace_id,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                )
            yield live.last(self._clock.monotonic())
        finally:
            self.abandon(live)

    async def whole(self, live: Live) -> Generated:
        """The whole answer. Cancelling this ends the request."""
        try:
            delta = await live.output.next()
            last = live.last(self._clock.monotonic())
            if delta is None:
                return last
            fields = {"text": delta.text, "token_ids": delta.token_ids, "logprobs": delta.logprobs}
            return last.model_copy(update=fields)
        finally:
            self.abandon(live)

    def abandon(self, live: Live) -> None:
        """The client is gone: frees whatever the request still holds. Nothing happens if it is over."""
        self.dispatcher.fail(live, Cancelled("the client is gone"))

    def close(self) -> None:
        """Ends what is still running and the tokenising thread."""
        for live in list(self.dispatcher.live.values()):
            self.dispatcher.fail(live, Unavailable("the gateway is stopping"))
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def _tokens(self, intake: Intake, generate: Generate) -> list[int]:
        if not intake.heavy(generate):
            return intake.tokenize(generate)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, intake.tokenize, generate)

    def _ready(self) -> Intake:
        if self._closing():
            raise Unavailable("the gateway is stopping", retry_after_s=1.0)
        if self.intake is None:
            raise Unavailable("the gateway is starting: its block manager has not answered yet", retry_after_s=1.0)
        return self.intake
