"""A request while it is being served: the state machine, its text, its client and its trace, in one place."""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import dataclass

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import Span

from services.gateway.output import Output
from services.gateway.request import Request
from services.gateway.text import TextStream
from shared import telemetry
from shared.messages import Generated


@dataclass(slots=True)
class Live:
    """What the dispatcher keeps of a request from admission to its end."""

    request: Request
    text: TextStream
    output: Output
    span: Span  # the request's root; whoever opened it ends it
    context: contextvars.Context  # that span is current in it: whatever is sent for the request is sent from here
    hidden: frozenset[int]  # tokens that end the answer and are no part of its text
    timer: asyncio.TimerHandle | None = None

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Ends timer and state, and writes the account into the span; the output is the dispatcher's to end."""
        if self.timer is not None:
            self.timer.cancel()
        self.request.end()
        usage = self.request.usage()
        self.span.set_attribute(telemetry.PROMPT_TOKENS, usage.prompt_tokens)
        self.span.set_attribute(telemetry.COMPLETION_TOKENS, usage.completion_tokens)
        self.span.set_attribute(telemetry.CACHED_TOKENS, usage.cached_tokens)
        self.span.set_attribute(telemetry.ATTEMPT, self.request.attempt)
        if self.request.finish_reason is not None:
            self.span.set_attribute(telemetry.FINISH_REASON, [self.request.finish_reason])
        if self.span.is_recording():
            self._record_queueing()

    def _record_queueing(self) -> None:
        """The wait for a worker as a span of its own, made afterwards."""
        request = self.request
        if request.placed_at is not None:
            waited = request.placed_at - request.started
            start, end = round(request.arrival_s * 1e9), round((request.arrival_s + waited) * 1e9)
            below = trace.set_span_in_context(self.span, otel.Context())
            telemetry.tracer().start_span(telemetry.QUEUE, below, start_time=start).end(end)

    def last(self, now: float) -> Generated:
        """The event that ends the stream: everything but text and tokens."""
        request = self.request
        return Generated(
            request_id=request.id,
            trace_id=self.trace_id,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            usage=request.usage(),
            timings=request.timings(now),
            actors=request.actors,
            pages=request.pages,
            attempts=request.attempt + 1,
        )


def span_and_context(below: otel.Context) -> tuple[Span, contextvars.Context]:
    """The current span of `below`, and a context of Python's kind in which it is current."""
    context = contextvars.Context()
    context.run(otel.attach, below)
    return trace.get_current_span(below), context
