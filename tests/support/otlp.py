"""A real OTLP/HTTP trace receiver: decodes what exporters send and keeps it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """One exported span; ids are hex, times are nanoseconds since the epoch, `parent_id` is empty for a root."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    events: tuple[str, ...] = ()


class OtlpReceiver:
    """Listens on a free port of loopback between `__enter__` and `__exit__`; `endpoint` is its base URL."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the tests look at spans."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Everything received so far."""
        with self._changed:
            return list(self._spans)

    def wait(self, enough: Callable[[list[ReceivedSpan]], bool], limit_s: float = 15.0) -> list[ReceivedSpan]:
        """Blocks until `enough(spans)`; raises AssertionError with what came instead after `limit_s`."""
        give_up = time.monotonic() + limit_s
        with self._changed:
            while not enough(self._spans):
                if not self._changed.wait(give_up - time.monotonic()):
                    got = sorted(f"{span.service}:{span.name}" for span in self._spans)
                    raise AssertionError(f"the expected spans did not arrive in {limit_s:g} s; got {got}")
            return list(self._spans)

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for resource_spans in request.resource_spans:
                resource = {pair.key: _value(pair.value) for pair in resource_spans.resource.attributes}
                for scope_spans in resource_spans.scope_spans:
                    self._spans.extend(_received(span, resource) for span in scope_spans.spans)
            self._changed.notify_all()


def orphans(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """Spans whose parent was never received."""
    known = {(span.trace_id, span.span_id) for span in spans}
    return [span for span in spans if span.parent_id and (span.trace_id, span.parent_id) not in known]


def _received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource.get("service.name", ""),
        instance=resource.get("service.instance.id", ""),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == 2,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        events=tuple(event.name for event in span.events),
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
