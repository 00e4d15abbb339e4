"""From start to stop: readiness, heartbeats, discovery, drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

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
