"""A whole pipeline for end-to-end tests: `kvrelay up` as a user starts it, on free ports, with its own state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgpack
import nats
import nats.errors
from nats.aio.client import Client

from services.cli.child import die_with_parent
from shared import settings
from shared.pool.shm import directory, pool_path
from tests.support.processes import alive, family

START_LIMIT_S = 120
RUN_LIMIT_S = 120
"""For commands that end by themselves: against hanging, on however busy a machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pipeline:
    """A running `kvrelay up`."""

    def __init__(self, state: Path, options: tuple[str, ...]) -> None:
        self.state = state
        self.http_port, self.nats_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.log = state / "up.log"
        state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "services.cli", "up", "--state-dir", str(state)]
        command += ["--http-port", str(self.http_port), "--nats-port", str(self.nats_port), *options]
        self._output = self.log.open("wb")
        self.process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"kvrelay up ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {limit_s} s:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> int:
        """SIGINT as from a terminal; returns the exit code. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                raise AssertionError(f"did not stop within 30 s:\n{self.log.read_text()[-4000:]}") from None
        self._output.close()
        return self.process.returncode

    def cli(self, *arguments: str, timeout_s: float = RUN_LIMIT_S) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.cli", *arguments, "--state-dir", str(self.state)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)

    def stats(self) -> dict[str, Any]:
        done = self.cli("stats", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def pids(self) -> dict[str, int]:
        """The process of each actor the gateway has heard of lately."""
        return {actor["actor"]: actor["pid"] for actor in httpx.get(f"{self.url}/health", timeout=5).json()["actors"]}

    def pools(self) -> dict[str, Any]:
        """What the block manager says of its pools; an AssertionError if it does not answer."""

        async def ask() -> dict[str, Any]:
            async with self.nats() as client:
                reply = await client.request("kvrelay.block_manager.stats", b"{}", timeout=10)
                return json.loads(reply.data)["pools"]

        with ThreadPoolExecutor(1) as thread:  # a loop of its own, because tests with and without one call this
            try:
                return thread.submit(asyncio.run, ask()).result()
            except nats.errors.NoRespondersError:
                raise AssertionError("no block manager answers") from None

    def generate(self, prompt: str, *arguments: str) -> dict[str, Any]:
        done = self.cli("generate", prompt, "--json", "--no-stream", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def credentials(self, role: str) -> tuple[str, str]:
        """User and password of a role of the embedded NATS server."""
        access = settings.connection(settings.CommonSettings(state_dir=self.state), role)
        assert access.user is not None and access.password is not None
        return access.user, access.password

    @contextlib.asynccontextmanager
    async def nats(self, role: str = "client") -> AsyncIterator[Client]:
        """A plain nats-py connection, as any user's program would have."""
        user, password = self.credentials(role)
        url = f"nats://127.0.0.1:{self.nats_port}"
        client = await nats.connect(url, user=user, password=password, inbox_prefix=f"_INBOX.{role}".encode())
        try:
            yield client
        finally:
            await client.close()


@contextlib.contextmanager
def pipeline(state: Path, *options: str) -> Iterator[Pipeline]:
    """Starts, yields and stops a pipeline; it must stop cleanly and leave no process and no shared memory behind."""
    running = Pipeline(state, options)
    pids: list[int] = []
    try:
        yield running
        pids = family(running.process.pid)
    finally:
        code = running.stop()
    assert code == 0, running.log.read_text()[-4000:]
    assert not [pid for pid in pids if alive(pid)], "a process outlived kvrelay up"
    assert not list(directory().glob(f"{pool_path('', state).name}*")), "shared memory was left behind"


def at_rest(running: Pipeline) -> None:
    """Asserts that no page and no tail is held."""
    for name, pool in running.pools().items():
        assert pool["filling"] == pool["active"] == pool["quarantined"] == 0, (name, pool)
        assert pool["free"] + pool["cached"] == pool["total"], (name, pool)
        assert pool["tails_free"] == pool["tails_total"], (name, pool)


def comes_true(claim: Callable[[], None], limit_s: float) -> None:
    """Makes the claim until it holds, and raises its AssertionError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return claim()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


async def stream(client: Client, body: dict[str, Any], *, timeout_s: float = 120) -> AsyncIterator[dict[str, Any]]:
    """Publishes `body` to `gateway.generate` and yields the events up to the empty message; errors are raised."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish("kvrelay.gateway.generate", msgpack.packb({**body, "stream": True}), reply=inbox)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            message = await subscription.next_msg(timeout=max(0.01, deadline - time.monotonic()))
            headers = message.headers or {}
            if "Nats-Service-Error-Code" in headers:
                raise RuntimeError(f"{headers['Nats-Service-Error-Code']} {headers.get('Nats-Service-Error')}")
            if not message.data:
                return
            yield msgpack.unpackb(message.data, strict_map_key=False)
    finally:
        await subscription.unsubscribe()


async def collect(client: Client, body: dict[str, Any], *, timeout_s: float = 120) -> dict[str, Any]:
    """The whole stream as one answer: joined text and token ids, plus the fields of the last event."""
    text, token_ids, last = "", [], {}
    async for event in stream(client, body, timeout_s=timeout_s):
        text += event.get("text", "")
        token_ids += event.get("token_ids", [])
        last = event
    return {**last, "text": text, "token_ids": token_ids}
