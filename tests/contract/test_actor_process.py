"""An actor as a process: signals, exit codes, and what it says when it cannot go on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from infra.nats.server import NatsServer
from shared import errors
from shared.bus import Bus
from tests.conftest import Connect
from tests.support.actors import Ask
from tests.support.otlp import OtlpReceiver

PROCESS = """
import asyncio, sys
from collections.abc import AsyncIterator
from shared.actor import Actor, Call, handles, run_actor
from shared.errors import Misconfigured
from tests.support.actors import Ask

class Gateway(Actor):
    name = "gateway"
    async def setup(self):
        if sys.argv[1] == "misconfigured":
            raise Misconfigured("model: there is no file of that name")
        if sys.argv[1] == "hopeless":
            self.supervise("broken", self.broken)
        if sys.argv[1] == "teardown":
            raise Misconfigured("too late")
        if sys.argv[1] == "endless":
            print("setting up", file=sys.stderr, flush=True)
            await asyncio.Event().wait()
    async def teardown(self):
        print("torn down", file=sys.stderr)
    async def broken(self):
        raise RuntimeError("always")
    @handles("generate", Ask, root=True)
    async def generate(self, message: Ask, call: Call) -> Ask:
        print("accepted", file=sys.stderr, flush=True)
        await asyncio.sleep(message.count / 1000)
        return message

run_actor(Gateway)
"""


class Process:
    """The gateway above as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, text: str, times: int = 1) -> None:
        """Waits until so many lines of its log have been `text`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while times:
                times -= (await self.process.stderr.readline()).decode().strip() == text

    async def end(self, limit_s: float = 20) -> tuple[int, str]:
        """Exit code and log."""
        assert self.process.stderr is not None
        log = await asyncio.wait_for(self.process.stderr.read(), limit_s)
        return await self.process.wait(), log.decode()


Start = Callable[..., "asyncio.Future[Process]"]


@pytest.fixture
async def start(nats_server: NatsServer) -> AsyncIterator[Start]:
    started: list[asyncio.subprocess.Process] = []

    async def one(how: str = "", **environ: str) -> Process:
        login = nats_server.credentials.roles["gateway"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROCESS, how,
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={
                "PATH": "/usr/bin:/bin",
                "KVRELAY_NATS_URL": nats_server.url,
                "KVRELAY_NATS_USER": login.user,
                "KVRELAY_NATS_PASSWORD": login.password,
                **environ,
            },
        )  # fmt: skip
        started.append(process)
        return Process(process)

    yield one  # type: ignore[misc]
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready(client: Bus) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await client.request("gateway.generate", Ask(count=0), Ask, timeout_s=1)
                return
            except errors.Unavailable:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_with_40_in_flight_answers_40_and_exits_0(
    start: Start, connect: Connect, number: signal.Signals
) -> None:
    process, client = await start(), await connect(namespace="kvrelay")
    await _ready(client)
    asked = [
        asyncio.create_task(client.request("gateway.generate", Ask(text=str(n), count=700), Ask, timeout_s=20))
        for n in range(40)
    ]
    await process.says("accepted", 1 + 40)
    process.process.send_signal(number)
    answers = await asyncio.gather(*asked)
    assert sorted(int(answer.text) for answer in answers) == list(range(40))
    code, log = await process.end()
    assert code == 0, log


async def test_a_signal_during_setup_stops_it(start: Start) -> None:
    process = await start("endless")
    await process.says("setting up")
    process.process.send_signal(signal.SIGTERM)
    assert (await process.end(5))[0] == 0


async def test_a_wrong_setting_exits_2_and_says_so(start: Start) -> None:
    for process, text in (
        (await start("misconfigured"), "there is no file of that name"),
        (await start(KVRELAY_MAX_INFLIGHT="0"), "max_inflight (KVRELAY_MAX_INFLIGHT)"),
        (await start(KVRELAY_NATS_PASSWORD="guess"), "refused the credentials"),
        (await start(KVRELAY_NAMESPACE="other"), "forbids"),
    ):
        code, log = await process.end()
        assert (code, text in log) == (2, True), log
        assert "Traceback" not in log and "guess" not in log


async def test_what_setup_opened_is_closed_even_if_it_failed(start: Start) -> None:
    code, log = await (await start("teardown")).end()
    assert code == 2 and "torn down" in log and "too late" in log


async def test_a_loop_that_keeps_failing_exits_1(start: Start) -> None:
    code, log = await (await start("hopeless")).end()
    assert code == 1 and "background loop given up" in log


async def test_a_dead_collector_does_not_hang_the_exit(start: Start, connect: Connect) -> None:
    """A collector that takes connections and never answers is the worst kind."""
    held: list[asyncio.StreamWriter] = []

    async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    dead = await asyncio.start_server(never, "127.0.0.1", 0)
    port = dead.sockets[0].getsockname()[1]
    process, client = await start(KVRELAY_OTLP_ENDPOINT=f"http://127.0.0.1:{port}"), await connect(namespace="kvrelay")
    await _ready(client)
    for _ in range(300):
        await client.request("gateway.generate", Ask(count=0), Ask, timeout_s=2)
    process.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, _ = await process.end()
    assert code == 0 and time.monotonic() - began < 5
    assert held, "the collector was never asked"
    for writer in held:
        writer.close()
    dead.close()


@pytest.mark.parametrize(("level", "told"), [("info", True), ("error", False)])
async def test_log_level_and_format_are_settings(start: Start, connect: Connect, level: str, told: bool) -> None:
    process, client = (
        await start(KVRELAY_LOG_LEVEL=level, KVRELAY_LOG_FORMAT="json"),
        await connect(namespace="kvrelay"),
    )
    await _ready(client)
    process.process.send_signal(signal.SIGTERM)
    code, log = await process.end()
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert code == 0 and ("started" in {event["event"] for event in events}) == told
    assert not told or {event["actor"] for event in events} == {"gateway"}


@pytest.mark.parametrize(("ratio", "sampled"), [("1", True), ("0", False)])
async def test_the_share_of_traces_is_a_setting(
    start: Start, connect: Connect, otlp: OtlpReceiver, ratio: str, sampled: bool
) -> None:
    environ = {"KVRELAY_OTLP_ENDPOINT": otlp.endpoint, "KVRELAY_TRACE_SAMPLE_RATIO": ratio}
    process, client = await start(**environ), await connect(namespace="kvrelay")
    await _ready(client)
    process.process.send_signal(signal.SIGTERM)
    assert (await process.end())[0] == 0  # what it has is sent before it exits
    assert bool(otlp.spans) == sampled
