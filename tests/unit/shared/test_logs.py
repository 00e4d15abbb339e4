"""Log lines: their level, form and trace; and that a failure never shows what a user wrote."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from opentelemetry import context as otel
from shared import logs, telemetry
logs.setup(sys.argv[1], sys.argv[2], actor="prefill")
log = logs.get()
log.debug("a detail")
log.info("started", port=1)
logging.getLogger("kernels.dispatch").info("kernels: cpu")
logging.getLogger("a.library").info("chatter")
logging.getLogger("a.library").warning("of %s", "note")
telemetry.setup("prefill", "prefill-1", None)
_, below = telemetry.start_request("x", otel.Context(), {})
token = otel.attach(below)
log.warning("inside")
otel.detach(token)
def handler(prompt):
    raise RuntimeError("broken")
try:
    handler("hunter2")
except RuntimeError as error:
    log.error("failed", exc_info=error)
"""


def lines(level: str, form: str) -> str:
    command = [sys.executable, "-c", PROGRAM, level, form]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stdout, "logs go to stderr; stdout is for answers"
    return done.stderr


@pytest.mark.parametrize("form", ["json", "console", "auto"])
def test_a_traceback_does_not_show_the_users_words(form: str) -> None:
    text = lines("info", form)
    assert "RuntimeError: broken" in text
    assert "hunter2" not in text


def test_json_lines_carry_actor_and_trace() -> None:
    found = [json.loads(line) for line in lines("info", "json").splitlines()]
    assert [line["event"] for line in found] == ["started", "kernels: cpu", "of note", "inside", "failed"]
    assert all(line["actor"] == "prefill" and line["timestamp"].endswith("Z") for line in found)
    assert found[2]["logger"] == "a.library" and found[2]["level"] == "warning"
    assert len(found[3]["trace_id"]) == 32 and "trace_id" not in found[0]


def test_the_level_decides_what_is_said() -> None:
    assert "a detail" in lines("debug", "json")
    assert "a detail" not in lines("info", "json")
    assert "of note" in lines("warning", "json")
    assert [json.loads(line)["event"] for line in lines("error", "json").splitlines()] == ["failed"]
    assert "inside" not in lines("error", "json")


def test_console_is_for_people() -> None:
    text = lines("info", "console")
    assert "started" in text and not text.startswith("{")
