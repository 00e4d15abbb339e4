"""The embedded server with real processes: ports, restarts, passwords, permissions."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import nats
import nats.errors
import pytest

from infra.nats.config import LOG, render
from infra.nats.credentials import Credentials
from infra.nats.roles import ACTORS, ROLES, inbox_prefix
from infra.nats.server import NatsServer, find_binary
from services.cli.child import die_with_parent
from shared.errors import Misconfigured
from shared.settings import CommonSettings, connection


@pytest.fixture
def server(own_nats_server: NatsServer) -> NatsServer:
    return own_nats_server


async def connect(server: NatsServer, role: str, errors: asyncio.Queue[Exception] | None = None) -> nats.NATS:
    async def note(error: Exception) -> None:
        if errors is not None:
            errors.put_nowait(error)

    return await nats.connect(
        server.url,
        user=role,
        password=server.credentials.roles[role].password,
        inbox_prefix=inbox_prefix(role).encode(),
        allow_reconnect=False,
        error_cb=note,
    )


async def test_credentials_are_private_and_differ_between_roles(server: NatsServer, tmp_path: Path) -> None:
    path = tmp_path / "nats.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "nats" / "server.conf").stat().st_mode) == 0o600
    stored = json.loads(path.read_text())
    assert stored["url"] == server.url
    for role, login in server.credentials.roles.items():
        access = connection(CommonSettings(state_dir=tmp_path), role)
        assert (access.url, access.user, access.password) == (server.url, login.user, login.password)
    assert set(stored["users"]) == set(ROLES)
    assert len(set(stored["users"].values())) == len(ROLES)


async def test_a_wrong_password_is_refused(server: NatsServer) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(server.url, user="gateway", password="guess", allow_reconnect=False)


async def test_a_killed_server_comes_back_on_its_port_with_its_passwords(server: NatsServer) -> None:
    url, users = server.url, server.credentials.roles
    server.process.kill()
    await server.process.wait()
    await server.start()
    assert (server.url, server.credentials.roles) == (url, users)
    client = await connect(server, "client")
    await client.close()


async def test_any_name_of_the_state_directory_will_do(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / 'é 你 "quoted" back\\slash' / os.fsdecode(b"caf\xe9"), preexec=die_with_parent())
    await server.start()
    await server.stop()


async def test_why_it_does_not_start_is_said_in_its_own_words(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    folder.mkdir()
    (folder / LOG).write_text("of an earlier run\n")
    (folder / "jetstream").write_text("no folder\n")
    with pytest.raises(Misconfigured, match="not a directory") as refusal:
        await NatsServer(tmp_path, preexec=die_with_parent()).start()
    assert "earlier run" not in str(refusal.value)


def test_an_external_server_takes_what_is_printed_for_it(tmp_path: Path) -> None:
    printed = subprocess.run([sys.executable, "-m", "infra.nats", "other"], capture_output=True, text=True, check=True)
    config = tmp_path / "nats.conf"
    config.write_text(printed.stdout)
    checked = subprocess.run([find_binary(), "-t", "-c", config], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert '"other.gateway.generate"' in printed.stdout
    tables = tomllib.loads("\n".join(line[2:] for line in printed.stdout.splitlines() if line.startswith("# ")))
    for actor in ACTORS:
        assert tables[actor]["nats_user"] == actor
        assert f'user: {actor}, password: "{tables[actor]["nats_password"]}"' in printed.stdout


def test_a_client_that_vanished_is_noticed_within_a_minute(tmp_path: Path) -> None:
    text = render(host="h", port=1, folder=tmp_path, namespace="n", credentials=Credentials.generate(""))
    assert 'ping_interval: "10s"\nping_max: 2\n' in text


async def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Misconfigured, match=f"{port} is taken.*--nats-port"):
            await NatsServer(tmp_path, port=port).start()


@pytest.mark.parametrize("role", ACTORS)
async def test_an_actor_cannot_serve_in_the_name_of_another(server: NatsServer, role: str) -> None:
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    connection = await connect(server, role, errors)
    for other in set(ACTORS) - {role}:
        await connection.subscribe(f"kvrelay.{other}.anything", cb=_ignore)
    await connection.subscribe(f"{inbox_prefix('client')}.>", cb=_ignore)
    for _ in ACTORS:
        assert "permissions violation" in str(await asyncio.wait_for(errors.get(), 5)).lower()
    await connection.close()


async def test_a_client_may_ask_the_gateway_but_no_worker(server: NatsServer) -> None:
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    gateway, client = await connect(server, "gateway", errors), await connect(server, "client", errors)

    async def answer(message: nats.aio.msg.Msg) -> None:
        await gateway.publish(message.reply, b"answer")

    await gateway.subscribe("kvrelay.gateway.generate", cb=answer)
    await gateway.flush()
    assert (await client.request("kvrelay.gateway.generate", b"", timeout=5)).data == b"answer"
    assert errors.empty()
    await client.publish("kvrelay.prefill.run", b"")
    assert "permissions violation" in str(await asyncio.wait_for(errors.get(), 5)).lower()
    await client.close()
    await gateway.close()


async def test_a_client_needs_no_inbox_option(server: NatsServer) -> None:
    gateway = await connect(server, "gateway")

    async def answer(message: nats.aio.msg.Msg) -> None:
        await gateway.publish(message.reply, b"answer")

    await gateway.subscribe("kvrelay.gateway.generate", cb=answer)
    await gateway.flush()
    plain = await nats.connect(server.url, user="client", password=server.credentials.roles["client"].password)
    assert (await plain.request("kvrelay.gateway.generate", b"", timeout=5)).data == b"answer"
    await plain.close()
    await gateway.close()


async def test_jetstream_keeps_its_files_in_the_state_directory(server: NatsServer, tmp_path: Path) -> None:
    admin = await connect(server, "admin")
    await admin.jetstream().add_stream(name="queue", subjects=["kvrelay.queue"])
    await admin.jetstream().publish("kvrelay.queue", b"kept")
    server.process.kill()
    await server.process.wait()
    await server.start()
    again = await connect(server, "admin")
    assert (await again.jetstream().stream_info("queue")).state.messages == 1
    assert any((tmp_path / "nats" / "jetstream").rglob("*.blk"))
    await again.close()


async def _ignore(_: nats.aio.msg.Msg) -> None:
    """A subscription needs a callback."""
