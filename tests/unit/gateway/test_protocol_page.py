"""`docs/protocol.md` says what the code does: every subject, error, header and metric is on it, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import partial
from pathlib import Path

from prometheus_client.metrics_core import Metric

from services.gateway.metrics import Metrics
from services.gateway.watch import KINDS, Watch
from shared import errors, headers, messages
from shared.actor import Actor
from shared.route import Declared

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


def routes() -> set[tuple[str, str]]:
    """(subject, body) of every handler of every actor."""
    found = set()
    for kind in KINDS:
        classes = vars(importlib.import_module(f"services.{kind}.actor")).values()
        actor = next(
            c for c in classes if isinstance(c, type) and issubclass(c, Actor) and c.__dict__.get("name") == kind
        )
        for attribute in map(partial(inspect.getattr_static, actor), dir(actor)):
            for declared in getattr(attribute, "__dict__", {}).values():
                if isinstance(declared, Declared):
                    subject = declared.verb if declared.event else f"{kind}.{declared.verb}"
                    found.add((subject + (".<instance>" if declared.to == "instance" else ""), declared.kind.__name__))
    return found


def test_every_subject_and_its_body_are_on_the_page() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    wanted = routes()
    for subject, body in wanted:
        assert any(f"`{subject}`" in row and f"`{body}`" in row for row in rows), (subject, body)
    first = "|".join((*KINDS, "event"))
    named = {word for row in rows for word in re.findall(rf"`((?:{first})\.[a-z_.<>]+)`", row)}
    assert named == {subject for subject, _ in wanted}


def test_every_message_named_is_one_of_ours() -> None:
    known = set(dir(messages)) | {name for name, value in vars(errors).items() if isinstance(value, type)}
    foreign = {"Retry-After", "Preempted", "BlockTable", "TailHandle", "HEAD", "GET"}
    words = set(re.findall(r"`([A-Z][A-Za-z]+)`", PAGE))
    assert words - known - foreign == set()


def test_every_error_and_header_is_on_the_page() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and name not in ("KvrelayError", "Misconfigured"):
            again = "yes" if kind.retryable else "no"
            assert f"| `{name}` | {kind.code} | {again} |" in PAGE
    for name in ("TRACEPARENT", "REQUEST_SPAN", "TIMEOUT_MS", "KEEPALIVE", "SEQUENCE", "ERROR_CODE", "ERROR_TEXT"):
        assert f"`{getattr(headers, name)}`" in PAGE
    assert f"`{headers.ERROR_KIND}`" in PAGE and f"`{headers.RETRY_AFTER_MS}`" in PAGE


def test_every_metric_is_on_the_page() -> None:
    def shown(metric: Metric) -> str:
        return metric.name + ("_total" if metric.type == "counter" else "")

    names = {shown(metric) for metric in Metrics(Watch()).registry.collect()}
    assert set(re.findall(r"`(kvrelay_\w+)[`{]", PAGE)) == names
