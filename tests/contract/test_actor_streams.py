"""Streams: in order, without gaps, ended once; and a consumer that goes away is noticed, whoever it is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgpack
import nats
import pytest

from infra.nats.server import NatsServer
from shared import errors
from shared.actor import Actor, Call, handles
from shared.bus import KEEPALIVE_S
from shared.bus_stream import STREAM_BUFFER, Arrivals
from tests.conftest import Connect
from tests.support.actors import Ask, running
from tests.support.waiting import until


class Source(Actor):
    name = "source"

    async def setup(self) -> None:
        self.events: list[str] = []

    @handles("count", Ask)
    async def count(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        for number in range(message.count):
            yield Ask(text=str(number))

    @handles("either", Ask)
    async def either(self, message: Ask, call: Call) -> Ask | AsyncIterator[Ask]:
        return self.count(message, call) if message.text == "stream" else Ask(text="whole")

    @handles("breaks", Ask)
    async def breaks(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        yield Ask(text="first")
        raise errors.Stale("the pool is another one")

    @handles("faults", Ask)
    async def faults(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        yield Ask(text="first")
        raise RuntimeError("secret")

    @handles("ticks", Ask)
    async def ticks(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        """One message every `count` milliseconds, for ever."""
        try:
            while True:
                yield Ask(text="tick")
                await asyncio.sleep(message.count / 1000)
        finally:
            self.events.append(f"ended {message.text} gone={call.client_gone.is_set()}")

    @handles("silent", Ask)
    async def silent(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        self.events.append("began")
        try:
            await asyncio.Event().wait()
            yield Ask()
        finally:
            self.events.append(f"ended {message.text} gone={call.client_gone.is_set()}")

    @handles("works", Ask)
    async def works(self, message: Ask, call: Call) -> Ask:
        self.events.append("began")
        try:
            await asyncio.sleep(message.count / 1000)
        except asyncio.CancelledError:
            self.events.append(f"ended {message.text} gone={call.client_gone.is_set()}")
            raise
        return Ask(text="done")


async def test_a_stream_arrives_in_order_and_ends(connect: Connect) -> None:
    client = await connect()
    async with running(Source, await connect()):
        for count in (0, 1, 2, 1000):
            got = [item.text async for item in client.stream("source.count", Ask(count=count), Ask)]
            assert got == [str(number) for number in range(count)]
        got = [item.text async for item in client.stream("source.either", Ask(text="stream", count=3), Ask)]
        assert got == ["0", "1", "2"]
        assert (await client.request("source.either", Ask(), Ask, timeout_s=2)).text == "whole"


async def test_any_nats_client_sees_messages_and_an_empty_one_at_the_end(connect: Connect, namespace: str) -> None:
    client = await connect()
    async with running(Source, await connect()):
        nc = client.connection.client
        inbox = nc.new_inbox()
        subscription = await nc.subscribe(inbox)
        await nc.publish(f"{namespace}.source.count", b'{"count": 2}', reply=inbox)
        bodies = [(await subscription.next_msg(2)).data for _ in range(3)]
        assert bodies == [b'{"text":"0","count":1}', b'{"text":"1","count":1}', b""]


@pytest.mark.parametrize(("verb", "kind"), [("breaks", errors.Stale), ("faults", errors.Internal)])
async def test_an_error_in_a_stream_ends_it_after_what_was_sent(
    connect: Connect, verb: str, kind: type[errors.KvrelayError]
) -> None:
    client = await connect()
    async with running(Source, await connect()):
        got = []
        with pytest.raises(kind) as caught:
            async for item in client.stream(f"source.{verb}", Ask(), Ask):
                got.append(item.text)
        assert got == ["first"]
        assert "secret" not in str(caught.value)


async def test_a_stream_nobody_serves_fails_at_once(connect: Connect) -> None:
    client = await connect()
    with pytest.raises(errors.Unavailable, match="nobody serves"):
        await anext(client.stream("source.count", Ask(), Ask))


async def test_leaving_the_loop_ends_the_work_and_leaves_no_subscription(connect: Connect) -> None:
    client = await connect()
    async with running(Source, await connect()) as source:
        before = len(client.connection.client._subs)
        async for item in client.stream("source.ticks", Ask(text="left", count=10), Ask):
            assert item.text == "tick"
            break
        await until(lambda: source.events == ["ended left gone=True"], 1)
        await until(lambda: len(client.connection.client._subs) == before, 1)
        assert not source.serving.inflight and not source.bus._inbox._watches


async def test_a_consumer_that_leaves_in_silence_is_noticed_by_keepalives(connect: Connect) -> None:
    client = await connect()
    async with running(Source, await connect()) as source:
        async with aclosing(client.stream("source.silent", Ask(text="quiet"), Ask)) as items:
            waiting = asyncio.create_task(anext(items))
            await until(lambda: source.events == ["began"])
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: source.events[1:] == ["ended quiet gone=True"], 3 * KEEPALIVE_S)


async def test_a_silent_stream_is_kept_alive_past_the_idle_timeout(connect: Connect) -> None:
    client = await connect()
    async with running(Source, await connect()):
        began = time.monotonic()
        with pytest.raises(errors.Timeout):
            await anext(client.stream("source.silent", Ask(), Ask, idle_timeout_s=2.4 * KEEPALIVE_S, timeout_s=3.5))
        assert time.monotonic() - began > 3


async def test_a_server_that_went_silent_is_unavailable(connect: Connect, namespace: str) -> None:
    client, mute = await connect(), await connect()

    async def swallow(_: object) -> None:
        """Takes the message and never answers, as a stopped process would."""

    await mute.subscribe("source.count", swallow)
    with pytest.raises(errors.Unavailable, match=r"silent for 0\.3 s"):
        await anext(client.stream("source.count", Ask(), Ask, idle_timeout_s=0.3))


async def test_a_watched_request_that_is_cancelled_ends_the_work(connect: Connect) -> None:
    client = await connect()
    async with running(Source, await connect()) as source:
        fine = await client.request("source.works", Ask(count=5), Ask, timeout_s=5, watched=True)
        assert fine.text == "done"
        asking = asyncio.create_task(
            client.request("source.works", Ask(text="w", count=60_000), Ask, timeout_s=90, watched=True)
        )
        await until(lambda: source.events == ["began", "began"])
        asking.cancel()
        await until(lambda: source.events[2:] == ["ended w gone=True"], 3 * KEEPALIVE_S)


PLAIN_CLIENT = """
import asyncio, sys, nats
async def main():
    nc = await nats.connect(sys.argv[1], user="admin", password=sys.argv[2])
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    await nc.publish(sys.argv[3], b'{"text": "killed", "count": 20}', reply=inbox)
    while True:
        await subscription.next_msg(5)
        print("got", flush=True)
asyncio.run(main())
"""


async def test_a_killed_client_that_knows_nothing_of_us_is_noticed(
    connect: Connect, namespace: str, nats_server: NatsServer
) -> None:
    async with running(Source, await connect()) as source:
        password = nats_server.credentials.roles["admin"].password
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PLAIN_CLIENT, nats_server.url, password, f"{namespace}.source.ticks",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert client.stdout is not None
        assert await client.stdout.readline() == b"got\n"
        os.kill(client.pid, signal.SIGKILL)
        await client.wait()
        await until(lambda: source.events == ["ended killed gone=True"], 2)


async def test_a_lost_message_is_a_typed_error_not_a_gap(connect: Connect) -> None:
    client, lossy = await connect(), await connect()

    async def serve(msg: object) -> None:
        for index in (0, 1, 3):
            await lossy.reply(msg.reply, Ask(text=str(index)), "msgpack", index=index)  # type: ignore[attr-defined]

    await lossy.subscribe("source.count", serve)
    got = []
    with pytest.raises(errors.Unavailable, match="message 2 of the stream"):
        async for item in client.stream("source.count", Ask(), Ask):
            got.append(item.text)
    assert got == ["0", "1"]


async def test_a_consumer_too_slow_is_told_and_does_not_hold_up_others(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, overflow, fail = await connect(), asyncio.Event(), Arrivals.fail

    def noted(arrivals: Arrivals, error: errors.KvrelayError) -> None:
        fail(arrivals, error)
        overflow.set()

    monkeypatch.setattr(Arrivals, "fail", noted)
    async with running(Source, await connect()):
        slow = client.stream("source.count", Ask(count=STREAM_BUFFER + 500), Ask)
        assert (await anext(slow)).text == "0"
        for _ in range(50):
            assert [item.text async for item in client.stream("source.count", Ask(count=3), Ask)] == ["0", "1", "2"]
        await asyncio.wait_for(overflow.wait(), 20)
        got = 1
        with pytest.raises(errors.Unavailable, match="wait unread"):
            async for _ in slow:
                got += 1
        assert got <= STREAM_BUFFER + 1


async def test_msgpack_clients_get_msgpack(connect: Connect, namespace: str) -> None:
    async with running(Source, await connect()):
        nc = (await connect()).connection.client
        answer = await nc.request(f"{namespace}.source.either", msgpack.packb({}), timeout=2)
        assert isinstance(nc, nats.NATS) and msgpack.unpackb(answer.data)["text"] == "whole"
