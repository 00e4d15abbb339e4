"""`make demo` does what it says: an answer over NATS, what it took, and nothing left running."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from tests.support.processes import alive, family, session


def test_the_demo() -> None:
    command = [sys.executable, "-m", "infra.demo"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    for word in ("handled by", "prefill-", "decode-", "pages used", "first token after", "tokens/s", "trace id"):
        assert word in out, out
    assert "A computer network is" in out
    cached = re.search(r"found in the cache │\s*(\d+) tokens\s+│\s*(\d+) tokens", out)
    assert cached is not None and int(cached[1]) == 0 and int(cached[2]) >= 128
    # processes of `kvrelay up` have sessions of their own, but it has waited for them
    assert session(process.pid) == []


def test_stopping_the_demo_stops_the_pipeline() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(started := family(process.pid)) < 4 and time.monotonic() < deadline:  # up, NATS, the first actor
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and len(started) >= 4
    assert not [pid for pid in started if alive(pid)]
