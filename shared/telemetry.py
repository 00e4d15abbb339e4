"""Traces: set-up, every span and attribute name, context in and out of headers, and a shutdown that never hangs.

One trace per request across all actors. A hop's span is started by whoever serves the message, below the span the
message was sent from; a message sent outside of any span starts none, so heartbeats and renewals make no traces.
No span and no event per token.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, MutableMapping

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shared import headers as names
from shared.headers import get

# attributes
ACTOR = "kvrelay.actor"
VERB = "kvrelay.verb"
INSTANCE = "service.instance.id"
REQUEST_ID = "kvrelay.request_id"
ATTEMPT = "kvrelay.attempt"
MESSAGING_SYSTEM = "messaging.system"
ERROR_TYPE = "error.type"
PROMPT_TOKENS = "gen_ai.usage.input_tokens"
COMPLETION_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "kvrelay.cached_tokens"
FINISH_REASON = "gen_ai.response.finish_reasons"
TOKENS = "kvrelay.tokens"
CHUNKS = "kvrelay.chunks"

# spans that are not the serving of one message, and events
QUEUE = "gateway.queue"
PREFILL_COMPUTE = "prefill.compute"
DECODE_SEQUENCE = "decode.sequence"
CHUNK = "kvrelay.chunk"
MAX_EVENTS = 64  # of the 128 a span may carry

EXPORT_TIMEOUT_S = 2.0
SHUTDOWN_LIMIT_S = 1.5  # actors stop one after another, and a pipeline with a dead collector within 5 s
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_REQUEST_KEY = otel.create_key("kvrelay-request")
_provider: TracerProvider | None = None
_tracer: trace.Tracer = trace.NoOpTracer()


def setup(actor: str, instance: str, endpoint: str | None, sample_ratio: float = 1.0) -> None:
    """Starts tracing in this process. Without `endpoint` (base URL of an OTLP/HTTP collector) ids exist but nothing is
    recorded. The sampling decision is made where a request enters; everybody below follows it."""
    global _provider, _tracer
    shutdown()
    sampler: Sampler = ParentBased(TraceIdRatioBased(sample_ratio)) if endpoint else ALWAYS_OFF
    resource = Resource.create({"service.namespace": "kvrelay", "service.name": actor, INSTANCE: instance})
    # atexit's shutdown waits for a dead collector without limit: ours does not
    _provider = TracerProvider(sampler, resource, shutdown_on_exit=False, span_limits=SpanLimits())
    if endpoint:
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        _provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=16_384, schedule_delay_millis=1000, max_export_batch_size=512)
        )
    _tracer = _provider.get_tracer("kvrelay")


def shutdown(limit_s: float = SHUTDOWN_LIMIT_S) -> bool:
    """Sends what is queued, for at most `limit_s` seconds. False: the collector did not take it in time.

    Blocks; call it when the event loop has nothing left to do.
    """
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, trace.NoOpTracer()
    if provider is None:
        return True
    last = threading.Thread(target=provider.shutdown, name="telemetry-shutdown", daemon=True)
    last.start()
    last.join(limit_s)
    return not last.is_alive()


def tracer() -> trace.Tracer:
    """The process's tracer. Ask each time: `setup` replaces it."""
    return _tracer


def inject(carrier: MutableMapping[str, str]) -> None:
    """Writes the current span, and the request it belongs to, into headers. Outside of a span: nothing."""
    current = otel.get_current()
    span = trace.get_current_span(current).get_span_context()
    if not span.is_valid:
        return
    carrier[names.TRACEPARENT] = format_context(span)
    if span.trace_state:
        carrier[names.TRACESTATE] = span.trace_state.to_header()
    request = current.get(_REQUEST_KEY)
    if isinstance(request, SpanContext):
        carrier[names.REQUEST_SPAN] = format_context(request)


def extract(carrier: Mapping[str, str] | None) -> otel.Context:
    """The context a message was sent from; empty if it names none. Never the context of the reader."""
    parent = parse_context(get(carrier, names.TRACEPARENT))
    if parent is None:
        return otel.Context()
    found = trace.set_span_in_context(NonRecordingSpan(parent), otel.Context())
    request = parse_context(get(carrier, names.REQUEST_SPAN))
    return otel.set_value(_REQUEST_KEY, request, found) if request is not None else found


def request_context(context: otel.Context | None = None) -> otel.Context:
    """A context whose current span is the request's root, for spans made long after the hop that began the work."""
    request = (context if context is not None else otel.get_current()).get(_REQUEST_KEY)
    if not isinstance(request, SpanContext):
        return otel.Context()
    return otel.set_value(_REQUEST_KEY, request, trace.set_span_in_context(NonRecordingSpan(request), otel.Context()))


def has_parent(context: otel.Context) -> bool:
    """Whether `context` holds a span."""
    return trace.get_current_span(context).get_span_context().is_valid


def start_hop(name: str, context: otel.Context, attributes: Mapping[str, str]) -> tuple[Span, otel.Context]:
    """The span of serving one message, and the context below it."""
    span = _tracer.start_span(name, context, SpanKind.SERVER, attributes=dict(attributes))
    return span, trace.set_span_in_context(span, context)


def start_request(name: str, caller: otel.Context, attributes: Mapping[str, str]) -> tuple[Span, otel.Context]:
    """The root span of a request. The caller's own trace is linked, not continued: its flags must not decide ours."""
    link = trace.get_current_span(caller).get_span_context()
    links = [Link(link)] if link.is_valid else []
    span = _tracer.start_span(name, otel.Context(), SpanKind.SERVER, attributes=dict(attributes), links=links)
    below = trace.set_span_in_context(span, otel.Context())
    return span, otel.set_value(_REQUEST_KEY, span.get_span_context(), below)


def end(span: Span, error: BaseException | None = None) -> None:
    """Ends `span`; an error gives it a status and a type (a name, never a text with user data)."""
    if error is not None and span.is_recording():
        span.set_attribute(ERROR_TYPE, type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def format_context(context: SpanContext) -> str:
    """W3C `traceparent` of a span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def parse_context(text: str | None) -> SpanContext | None:
    """The span a `traceparent` names, or None if it is not a sound one. Unknown flag bits are kept out."""
    match = _TRACEPARENT.match(text) if text else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(int(match[2], 16), int(match[3], 16), True, TraceFlags(int(match[4], 16) & 1))
    return context if context.is_valid else None
