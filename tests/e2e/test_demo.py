"""`make demo` does what it says: an answer over NATS, what it took, and nothing left running."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.processes import session


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
