"""What `kvrelay up` tells, and that it goes on when nobody listens."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

SPEAK = """
import sys
from services.cli.report import Report
report = Report(sys.argv[1] == "json")
report.busy("waiting")
sys.stdin.readline()
for number in range(3):
    report.say("event", "text", number=number)
report.busy("")
sys.stderr.write("went on")
"""


def speaker(form: str, stdout: int) -> subprocess.Popen[str]:
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SPEAK, form], stdout=stdout, text=True, **streams)


@pytest.mark.parametrize("form", ["json", "people"])
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_listener_that_has_gone_ends_nothing(form: str, kind: str) -> None:
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    process = speaker(form, theirs)
    os.close(theirs)
    os.close(ours)
    _, said = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert said.endswith("went on") and "BrokenPipeError" not in said


def test_programs_get_one_object_a_line() -> None:
    process = speaker("json", subprocess.PIPE)
    out, _ = process.communicate("\n", timeout=60)
    assert [json.loads(line) for line in out.splitlines()] == [{"event": "event", "number": n} for n in range(3)]
