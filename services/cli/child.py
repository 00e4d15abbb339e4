"""One actor's process: in a session of its own, logging to a file, dying with its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 8192


def die_with_parent() -> Callable[[], None] | None:
    """A function to run in a child before it becomes another program: it gets SIGTERM when this process dies.

    Linux only; elsewhere None, and orphans end by themselves when their NATS server has gone.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return bind


class Child:
    """The process of one actor; `start` may be called again after it ended, and gives it a new instance name."""

    def __init__(
        self, name: str, actor: str, environment: Mapping[str, str], log: Path, command: Sequence[str] = ()
    ) -> None:
        """`name` tells several processes of one actor apart; `environment` is added to ours.

        `command` is what to run, by default the actor's own module.
        """
        self.name = name
        self.actor = actor
        self.instance = ""
        self._environment = dict(environment)
        self._command = tuple(command) or (sys.executable, "-m", f"services.{actor}")
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._started = 0.0
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Of the newest process, which may have ended; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started

    async def start(self) -> None:
        """Starts the process; its output goes to the end of the log."""
        self.instance = f"{self.actor}-{secrets.token_hex(3)}"
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._started = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, "KVRELAY_INSTANCE": self.instance},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    async def wait(self) -> int:
        """The exit code; negative is the number of the signal that ended it."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return await self._process.wait()

    async def stop(self, patience_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole session after `patience_s`. Harmless when it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        # not Process.terminate(): it polls first, and may take the exit code away from `wait`
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL at once to the process and what it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def last_words(self) -> list[str]:
        """The last lines that the newest process left in its log, oldest first."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
