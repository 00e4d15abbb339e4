"""The state directory of one pipeline: who holds it, where its logs and credentials are, where it can be reached.

up.lock      held by the `kvrelay up` that uses the directory; its pid inside
up.json      what that run serves: pid, HTTP and NATS address, model
nats.json    credentials (infra.nats.credentials)
nats/        the embedded server's files          logs/    one log per actor
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from shared.errors import Misconfigured


class StateDir:
    """A state directory held exclusively until `close`."""

    def __init__(self, path: Path) -> None:
        """Creates the directory (0700) if need be and locks it. Raises Misconfigured if it is in use or unusable."""
        self.path = path
        self.logs = path / "logs"
        self._summary = path / "up.json"
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
            self._lock = os.open(path / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Misconfigured(
                f"cannot use the state directory {path}: {error.strerror} ({error.filename}); "
                "choose another with --state-dir"
            ) from None
        self._take_lock()
        self._summary.unlink(missing_ok=True)
        (path / "nats.json").unlink(missing_ok=True)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise Misconfigured(f"cannot lock {self.path}: {error.strerror}") from None
            raise Misconfigured(
                f"a pipeline already runs with the state directory {self.path} (pid {holder}); "
                "stop it, or choose another directory with --state-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def log(self, name: str) -> Path:
        """The log file of one process of this run."""
        return self.logs / f"{name}.log"

    def describe(self, summary: dict[str, Any]) -> None:
        """Writes `up.json`, atomically: what this run serves and where."""
        fresh = self._summary.with_suffix(".new")
        fresh.write_text(json.dumps(summary, indent=2) + "\n")
        fresh.replace(self._summary)

    def close(self) -> None:
        """Removes what is true only while the pipeline runs and lets the directory go."""
        for name in ("up.json", "nats.json"):
            (self.path / name).unlink(missing_ok=True)
        os.ftruncate(self._lock, 0)
        os.close(self._lock)


def running(path: Path) -> dict[str, Any]:
    """The summary that the pipeline using `path` wrote once it was ready; empty if there is none."""
    try:
        summary = json.loads((path / "up.json").read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
