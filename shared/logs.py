"""Structured logs on stderr: one line per event, with its trace. Never log prompts, tokens or passwords."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog
from opentelemetry import trace
from structlog.typing import EventDict

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]


def setup(level: LogLevel = "info", form: LogFormat = "auto", **fields: str) -> None:
    """Configures the process's logs; `fields` (actor, instance) go on every line. `auto` is console on a terminal."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.processors.JSONRenderer()
    if console:
        # the pretty formatter shows local variables, and those hold what users wrote
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    number = getattr(logging, level.upper())

    def common(_: Any, __: str, event: EventDict) -> EventDict:
        for key, value in fields.items():
            event.setdefault(key, value)
        return event

    start: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        common,
        _add_trace,
    ]
    end = [structlog.processors.format_exc_info if not console else _unchanged, renderer]
    structlog.configure(
        processors=[*start, *end],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *start],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end],
    )
    libraries = logging.StreamHandler(sys.stderr)  # they, and `kernels`, log with Python's own
    libraries.setFormatter(formatter)
    logging.basicConfig(level=max(logging.WARNING, number), handlers=[libraries])
    logging.getLogger("kernels").setLevel(number)
    # the exporter tells each failed attempt to reach a collector; telemetry.py tells it once
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def get(**fields: Any) -> Any:
    """A logger; its first argument is the event in lower case words, the rest are fields."""
    return structlog.get_logger(**fields)


def _add_trace(_: Any, __: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


def _unchanged(_: Any, __: str, event: EventDict) -> EventDict:
    return event
