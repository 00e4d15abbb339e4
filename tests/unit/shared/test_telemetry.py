"""Span contexts in headers."""

from __future__ import annotations

import socket
import time

import pytest
from opentelemetry import context as otel
from opentelemetry import trace

from shared import telemetry

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03"


@pytest.fixture(autouse=True)
def tracing() -> None:
    telemetry.setup("test", "test-1", None)


def test_unknown_flag_bits_do_not_hide_that_a_span_is_sampled() -> None:
    context = telemetry.parse_context(GOOD)
    assert context is not None
    assert context.trace_flags.sampled
    assert telemetry.format_context(context) == GOOD[:-2] + "01"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00-xyz",
        GOOD.upper(),
        GOOD + "-more",
        "ff" + GOOD[2:],
        "00-" + "0" * 32 + GOOD[35:],
        GOOD[:36] + "0" * 16 + "-01",
        GOOD.replace("0af7", "0_f7"),
        GOOD + "\n",
    ],
)
def test_an_unsound_traceparent_is_no_parent(text: str | None) -> None:
    assert telemetry.parse_context(text) is None
    assert not telemetry.has_parent(telemetry.extract({"traceparent": text} if text else {}))


def test_a_newer_version_may_say_more() -> None:
    assert telemetry.parse_context("01" + GOOD[2:] + "-more") is not None


def test_headers_are_found_in_any_case() -> None:
    assert telemetry.has_parent(telemetry.extract({"Traceparent": GOOD}))


def test_nothing_is_injected_outside_of_a_span() -> None:
    carrier: dict[str, str] = {}
    telemetry.inject(carrier)
    assert carrier == {}


def test_the_request_travels_through_two_hops() -> None:
    root, context = telemetry.start_request("gateway.generate", telemetry.extract({"traceparent": GOOD}), {})
    assert f"{root.get_span_context().trace_id:032x}" not in GOOD, "a caller's trace must be linked, not continued"
    for _ in range(2):
        carrier: dict[str, str] = {}
        token = otel.attach(context)
        telemetry.inject(carrier)
        otel.detach(token)
        _, context = telemetry.start_hop("hop", telemetry.extract(carrier), {})
    below = trace.get_current_span(telemetry.request_context(context)).get_span_context()
    assert below.span_id == root.get_span_context().span_id


def test_a_collector_that_takes_connections_and_never_answers_delays_neither_work_nor_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        telemetry.setup("test", "test-1", f"http://127.0.0.1:{collector.getsockname()[1]}")
        began = time.monotonic()
        for _ in range(2000):  # several batches
            span, _ = telemetry.start_request("gateway.generate", otel.Context(), {})
            assert span.is_recording()
            telemetry.end(span)
        assert time.monotonic() - began < 1, "a span must not wait for the collector"
        assert not telemetry.shutdown()
        assert time.monotonic() - began < 1 + 2 * telemetry.SHUTDOWN_LIMIT_S
        assert telemetry.shutdown(), "there is nothing left to send"
