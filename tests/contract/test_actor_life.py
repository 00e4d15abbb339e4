"""From start to stop: readiness, heartbeats, discovery, drain, supervision, exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.nats.server import NatsServer
from shared import errors, wire
from shared.actor import Actor, Call, handles
from shared.bus import Bus
from shared.messages import Empty, Heartbeat
from shared.settings import CommonSettings
from tests.conftest import Connect
from tests.support.actors import Ask, running
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until


class Worker(Actor):
    name = "worker"

    async def setup(self) -> None:
        self.release = asyncio.Event()
        self.later: list[asyncio.Task[None]] = []
        self.problem = ""

    async def settle(self) -> None:
        await asyncio.gather(*self.later)

    def unready(self) -> str:
        return self.problem

    def details(self) -> dict[str, int]:
        return {"running": len(self.later)}

    @handles("work", Ask)
    async def work(self, message: Ask, call: Call) -> Ask:
        await self.release.wait()
        return message

    @handles("accept", Ask)
    async def accept(self, message: Ask, call: Call) -> Ask:
        self.later.append(self.spawn("later", self._later()))
        return message

    @handles("items", Ask)
    async def items(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        yield Ask(text="first")
        await self.release.wait()
        yield Ask(text="last")

    @handles("release", Empty, to="instance")
    def let_go(self, message: Empty, call: Call) -> None:
        self.release.set()

    async def _later(self) -> None:
        await self.release.wait()


@asynccontextmanager
async def heartbeats(bus: Bus) -> AsyncIterator[list[Heartbeat]]:
    heard: list[Heartbeat] = []

    async def hear(msg: object) -> None:
        heard.append(wire.decode(msg.data, Heartbeat))  # type: ignore[attr-defined]

    await bus.subscribe("event.actor.heartbeat", hear)
    yield heard


async def test_heartbeats_tell_state_reason_and_details(connect: Connect) -> None:
    client = await connect()
    async with heartbeats(client) as heard, running(Worker, await connect()) as worker:
        await until(lambda: heard)
        assert (heard[0].actor, heard[0].instance, heard[0].ready) == ("worker", worker.instance, True)
        assert heard[0].details == {"running": 0}
        worker.problem = "the pool is gone"
        await until(lambda: not heard[-1].ready and heard[-1].reason == "the pool is gone", 3)
        await worker.drain()
        await until(lambda: heard[-1].draining and not heard[-1].ready)


async def test_heartbeats_come_every_second_of_the_clock(connect: Connect) -> None:
    client, bus, clock = await connect(), await connect(), ManualClock()
    async with heartbeats(client) as heard:
        worker = Worker(bus, CommonSettings(), clock)
        await worker.start()
        for count in (1, 2, 3):
            await until(lambda count=count: len(heard) == count)  # type: ignore[misc]
            await asyncio.sleep(0.02)
            assert len(heard) == count
            await clock.advance(1.0)
        await worker.drain()


async def test_discovery_speaks_the_nats_micro_protocol(connect: Connect, namespace: str) -> None:
    client = await connect()
    async with running(Worker, await connect()) as worker:
        nc = client.connection.client

        async def ask(verb: str) -> dict:
            answers = [
                json.loads((await nc.request(f"$SRV.{verb}{tail}", b"", timeout=2)).data)
                for tail in (".worker", f".worker.{worker.instance}")
            ]
            assert answers[0] == answers[1] or verb == "STATS"
            return answers[1]

        ping = await ask("PING")
        assert ping["type"] == "io.nats.micro.v1.ping_response"
        assert (ping["name"], ping["id"], ping["version"]) == ("worker", worker.instance, "0.0.0")
        info = await ask("INFO")
        assert info["type"] == "io.nats.micro.v1.info_response"
        work = next(endpoint for endpoint in info["endpoints"] if endpoint["name"] == "work")
        assert (work["subject"], work["queue_group"]) == (f"{namespace}.worker.work", "worker")
        worker.release.set()
        await client.request("worker.work", Ask(), Ask, timeout_s=2)
        stats = await ask("STATS")
        assert stats["type"] == "io.nats.micro.v1.stats_response" and stats["started"].endswith("Z")
        work = next(endpoint for endpoint in stats["endpoints"] if endpoint["name"] == "work")
        assert work["num_requests"] == 1 and work["num_errors"] == 0 and work["processing_time"] > 0


async def test_drain_answers_what_was_accepted_and_refuses_the_rest(connect: Connect) -> None:
    client = await connect()
    worker = Worker(await connect(), CommonSettings())
    await worker.start()
    accepted = [
        asyncio.create_task(client.request("worker.work", Ask(count=number), Ask, timeout_s=20)) for number in range(40)
    ]
    await client.request("worker.accept", Ask(), Ask, timeout_s=2)
    await until(lambda: len(worker.serving.inflight) == 40)
    draining = asyncio.create_task(worker.drain())
    await until(lambda: worker.draining)
    with pytest.raises(errors.Unavailable):
        await asyncio.wait_for(_refused(client), 2)
    assert not draining.done()
    # what is addressed to this instance still arrives: accepted work may need it
    await client.request(f"worker.release.{worker.instance}", Empty(), Empty, timeout_s=2)
    assert sorted([answer.count for answer in await asyncio.gather(*accepted)]) == list(range(40))
    await draining
    assert all(task.done() for task in worker.later)


async def test_drain_lets_a_stream_come_to_its_end(connect: Connect) -> None:
    client = await connect()
    worker = Worker(await connect(), CommonSettings())
    await worker.start()
    stream = client.stream("worker.items", Ask(), Ask)
    assert (await anext(stream)).text == "first"
    draining = asyncio.create_task(worker.drain())
    await until(lambda: worker.draining)
    worker.release.set()
    assert [item.text async for item in stream] == ["last"]
    await draining


async def _refused(client: Bus) -> None:
    while True:
        await client.request("worker.accept", Ask(), Ask, timeout_s=0.5)


async def test_what_does_not_finish_in_time_gets_an_error(connect: Connect) -> None:
    client = await connect()
    worker = Worker(await connect(), CommonSettings(drain_timeout_s=0.2))
    await worker.start()
    asking = asyncio.create_task(client.request("worker.work", Ask(), Ask, timeout_s=20))
    await until(lambda: worker.serving.inflight)
    await worker.drain()
    with pytest.raises(errors.Unavailable, match="is stopping"):
        await asking


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
            await asyncio.Event().wait()
    async def teardown(self):
        print("torn down", file=sys.stderr)
    async def broken(self):
        raise RuntimeError("always")
    @handles("generate", Ask, root=True)
    async def generate(self, message: Ask, call: Call) -> Ask:
        await asyncio.sleep(message.count / 1000)
        return message

run_actor(Gateway)
"""


class Process:
    """The gateway above as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

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
    await asyncio.sleep(0.2)
    process.process.send_signal(number)
    answers = await asyncio.gather(*asked)
    assert sorted(int(answer.text) for answer in answers) == list(range(40))
    code, log = await process.end()
    assert code == 0, log


async def test_a_signal_during_setup_stops_it(start: Start) -> None:
    process = await start("endless")
    await asyncio.sleep(2.0)
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
