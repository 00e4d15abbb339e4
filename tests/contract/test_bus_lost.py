"""A lost connection: what is in flight gets typed errors, both sides come back with the server, nothing hangs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import nats
import pytest

from infra.nats.server import NatsServer
from services.cli.child import die_with_parent
from shared import errors
from shared.messages import Empty
from tests.support.actors import Ask, running
from tests.support.bus_actors import Gateway, connect, ticks
from tests.support.waiting import until


async def test_what_is_in_flight_when_the_server_dies_gets_typed_errors(own_nats_server: NatsServer) -> None:
    client, bus = await connect(own_nats_server), await connect(own_nats_server, "gateway")
    async with running(Gateway, bus, drain_timeout_s=1):
        slow = Ask(count=60_000)
        asked = [
            asyncio.create_task(client.request("gateway.generate", slow, Ask, timeout_s=90, watched=watched))
            for watched in (False, True)
        ]
        stream = client.stream("gateway.ticks", Ask(), Ask)
        await anext(stream)
        own_nats_server.process.kill()
        began = time.monotonic()
        results = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(errors.Unavailable):
            async for _ in stream:
                pass
        assert all(isinstance(result, errors.Unavailable) for result in results)
        assert time.monotonic() - began < 2
        with pytest.raises(errors.Unavailable, match="down"):
            await client.publish("gateway.generate", Ask())
        with pytest.raises(errors.Unavailable, match="down for"):
            await client.request("gateway.generate", Ask(), Ask, timeout_s=0.2)
    await client.close()
    await bus.close()


async def test_both_sides_come_back_with_the_server(own_nats_server: NatsServer) -> None:
    client, bus = await connect(own_nats_server), await connect(own_nats_server, "gateway")
    async with running(Gateway, bus) as gateway:
        for _ in range(2):
            await own_nats_server.stop()
            await until(lambda: not client.up and not bus.up)
            asking = asyncio.create_task(client.request("gateway.generate", Ask(text="waited"), Ask, timeout_s=20))
            await asyncio.sleep(0)  # it has begun, and waits for the connection
            assert not asking.done()
            await own_nats_server.start()
            while True:
                try:
                    assert (await asking).text == "waited"
                    break
                except errors.Unavailable:  # the client was back before the actor
                    asking = asyncio.create_task(
                        client.request("gateway.generate", Ask(text="waited"), Ask, timeout_s=20)
                    )
            assert len(await ticks(client, 3)) == 3
            await until(lambda: not gateway.serving.inflight, 3)
    await client.close()
    await bus.close()


@pytest.mark.parametrize("verb", ["ticks", "generate"])
async def test_who_comes_back_after_us_hears_how_it_ended(own_nats_server: NatsServer, verb: str) -> None:
    """A plain NATS client, which would wait for ever."""
    login = own_nats_server.credentials.roles["admin"]
    client = await nats.connect(
        own_nats_server.url,
        user="admin",
        password=login.password,
        reconnect_time_wait=1.5,  # type: ignore[arg-type]
    )
    bus = await connect(own_nats_server, "gateway")
    async with running(Gateway, bus) as gateway:
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        await client.publish(f"kvrelay.gateway.{verb}", b'{"count": 500}', reply=inbox)
        if verb == "ticks":
            await subscription.next_msg(2)
        else:
            await until(lambda: gateway.serving.inflight)
        await own_nats_server.stop()
        await until(lambda: not bus.up)
        await own_nats_server.start()
        last = await subscription.next_msg(8)
        while verb == "ticks" and not (last.headers or {}).get("Nats-Service-Error-Code"):
            assert last.data, "an end without an error, though messages were lost"
            last = await subscription.next_msg(8)
        assert last.data if verb == "generate" else last.headers["Nats-Service-Error-Code"] == "503"
        await until(lambda: not gateway.serving.inflight, 3)
    await client.close()
    await bus.close()


async def test_credentials_that_change_while_it_is_away_end_it(own_nats_server: NatsServer, tmp_path: Path) -> None:
    bus = await connect(own_nats_server, "gateway")
    port = int(own_nats_server.url.rpartition(":")[2])
    await own_nats_server.stop()
    other = NatsServer(tmp_path / "other", port=port, preexec=die_with_parent())
    await other.start()
    await asyncio.wait_for(bus.connection.closed.wait(), 5)
    assert isinstance(bus.connection.failure, errors.Unauthorized)
    with pytest.raises(errors.KvrelayError):
        await bus.request("prefill.run", Empty(), Empty, timeout_s=1)
    await bus.close()
    await other.stop()
