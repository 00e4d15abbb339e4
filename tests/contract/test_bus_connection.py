"""The connection: a wrong one fails at once, what NATS forbids is known, and closing leaves nobody waiting."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.nats.server import START_TIMEOUT_S, NatsServer, find_binary
from services.cli.child import die_with_parent
from shared import errors
from shared.actor import Actor
from shared.bus import Bus
from shared.settings import CommonSettings
from tests.support.actors import Ask, running
from tests.support.bus_actors import Gateway, connect, ticks
from tests.support.waiting import until


class Prefill(Actor):
    name = "prefill"


async def test_wrong_credentials_fail_at_once(nats_server: NatsServer) -> None:
    began = time.monotonic()
    with pytest.raises(errors.Unauthorized, match="refused the credentials") as caught:
        await connect(nats_server, password="guess")
    assert "guess" not in str(caught.value)
    assert time.monotonic() - began < 2


async def test_an_unreachable_server_is_unavailable_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match=f"cannot reach NATS at nats://127.0.0.1:{port}"):
        await Bus.connect(f"nats://user:hunter2@127.0.0.1:{port}")
    assert time.monotonic() - began < 2


async def test_something_that_is_not_nats_is_unavailable() -> None:
    over = asyncio.Event()

    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(errors.Unavailable):
        await Bus.connect(f"nats://127.0.0.1:{port}", timeout_s=0.5)
    over.set()
    server.close()


async def test_a_forbidden_subscription_is_refused(nats_server: NatsServer) -> None:
    bus = await connect(nats_server, "client")

    async def ignore(_: object) -> None: ...

    with pytest.raises(errors.Unauthorized, match=r"subscription to kvrelay\.gateway\.generate"):
        await bus.subscribe("gateway.generate", ignore)
    await bus.close()


OTHERS_CONFIG = """
listen: "127.0.0.1:-1"
ports_file_dir: {folder}
authorization {{
  users = [
    {{user: common, password: pw, permissions: {{publish: ">", subscribe: ["_INBOX.>"]}}}}
    {{user: deaf, password: pw, permissions: {{publish: ">", subscribe: ["nothing"]}}}}
    {{user: server, password: pw}}
  ]
}}
"""


@pytest.fixture
async def others_server(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a server somebody else configured, who knows of no inboxes per role."""
    (tmp_path / "server.conf").write_text(OTHERS_CONFIG.format(folder=json.dumps(str(tmp_path))))
    process = await asyncio.create_subprocess_exec(
        str(find_binary()),
        *("-c", str(tmp_path / "server.conf")),
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    ports = tmp_path / f"nats-server_{process.pid}.ports"
    try:
        await until(lambda: ports.exists() and ports.read_text(), START_TIMEOUT_S)
        yield json.loads(ports.read_text())["nats"][0]
    finally:
        process.terminate()
        await process.wait()


async def test_a_user_without_an_inbox_of_its_own_uses_the_common_one(others_server: str) -> None:
    server = await Bus.connect(others_server, user="server", password="pw")
    client = await Bus.connect(others_server, user="common", password="pw")
    async with running(Gateway, server):
        assert (await client.request("gateway.generate", Ask(text="x"), Ask, timeout_s=2)).text == "x"
        assert len(await ticks(client, 3)) == 3
        assert client.forbidden is None
    await client.close()
    await server.close()


async def test_a_user_without_any_inbox_is_refused(others_server: str) -> None:
    with pytest.raises(errors.Unauthorized, match="no inbox"):
        await Bus.connect(others_server, user="deaf", password="pw")


async def test_an_actor_with_the_wrong_role_does_not_start(nats_server: NatsServer) -> None:
    login = nats_server.credentials.roles["decode"]
    for namespace in ("kvrelay", "KVRelay"):
        bus = await Bus.connect(nats_server.url, user="decode", password=login.password, namespace=namespace)
        with pytest.raises(errors.Unauthorized, match=r"kvrelay\.gateway\."):
            await Gateway(bus, CommonSettings()).start()
        await bus.close()


async def test_a_forbidden_request_fails_at_once_and_unreadies_the_actor(nats_server: NatsServer) -> None:
    bus = await connect(nats_server, "gateway")
    async with running(Gateway, bus) as gateway:
        assert gateway.reason == ""
        began = time.monotonic()
        with pytest.raises(errors.Unauthorized, match=r"publish to kvrelay\.offload\.copy"):
            await bus.request("offload.copy", Ask(), Ask, timeout_s=20)
        assert time.monotonic() - began < 1
        assert "forbids" in gateway.reason
    await bus.close()


async def test_a_forbidden_publish_unreadies_the_actor(nats_server: NatsServer) -> None:
    bus = await connect(nats_server, "prefill")
    async with running(Prefill, bus) as prefill:
        await bus.publish("offload.copy", Ask())
        await until(lambda: "forbids" in prefill.reason)
    await bus.close()


async def test_a_callers_forbidden_reply_subject_does_not_unready_the_actor(nats_server: NatsServer) -> None:
    client, bus = await connect(nats_server), await connect(nats_server, "gateway")
    async with running(Gateway, bus) as gateway:
        await client.connection.client.publish("kvrelay.gateway.generate", b"{}", reply="somewhere.else")
        await client.request("gateway.generate", Ask(), Ask, timeout_s=2)
        await bus.connection.client.flush()
        assert gateway.reason == ""
    await client.close()
    await bus.close()


async def test_a_forbidden_stream_fails_at_once(nats_server: NatsServer) -> None:
    bus = await connect(nats_server, "client")
    with pytest.raises(errors.Unauthorized):
        await anext(bus.stream("offload.copy", Ask(), Ask))
    await bus.close()


async def test_closing_fails_what_waits_and_is_harmless_twice(nats_server: NatsServer) -> None:
    client, bus = await connect(nats_server), await connect(nats_server)

    heard = asyncio.Event()

    async def mute(_: object) -> None:
        heard.set()

    await bus.subscribe("test.mute", mute)
    asking = asyncio.create_task(client.request("test.mute", Ask(), Ask, timeout_s=20))
    await asyncio.wait_for(heard.wait(), 5)
    await client.close()
    with pytest.raises(errors.Unavailable, match="stopping"):
        await asking
    await client.close()
    await bus.close()
