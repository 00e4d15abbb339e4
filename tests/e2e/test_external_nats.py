"""`kvrelay up` with a NATS server that was there before and has a user for each role."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.nats.config import LOG
from infra.nats.roles import ACTORS
from infra.nats.server import NatsServer
from services.cli.child import die_with_parent

OPTIONS = ("--http-port", "0", "--num-blocks-override", "64", "--max-model-len", "512", "--threads", "1")
LIMIT_S = 120


async def kvrelay(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    command = (sys.executable, "-m", "services.cli", *arguments)
    return await asyncio.create_subprocess_exec(*command, **pipes, cwd=folder, preexec_fn=die_with_parent())


@pytest.fixture
async def up(own_nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A pipeline that is ready; each of its actors signs in as its table of kvrelay.toml says."""
    tables = [f'nats_url = "{own_nats_server.url}"']
    for actor in ACTORS:
        password = own_nats_server.credentials.roles[actor].password
        tables.append(f'[{actor}]\nnats_user = "{actor}"\nnats_password = "{password}"')
    (tmp_path / "kvrelay.toml").write_text("\n".join(tables))
    process = await kvrelay(tmp_path, "up", "--json", "--state-dir", "state", *OPTIONS)
    try:
        assert process.stdout is not None and process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            async for line in process.stdout:
                if json.loads(line)["event"] == "ready":
                    break
            else:
                raise AssertionError((await process.stderr.read()).decode())
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_request_is_served_with_no_more_rights_than_each_role_has(
    up: asyncio.subprocess.Process, own_nats_server: NatsServer, tmp_path: Path
) -> None:
    password = own_nats_server.credentials.roles["client"].password
    url = own_nats_server.url.replace("nats://", f"nats://client:{password}@")
    ask = ("generate", "One two three", "--raw", "--max-tokens", "20", "--temperature", "0", "--json")
    done = await kvrelay(tmp_path, *ask, "--nats-url", url)
    out, err = await asyncio.wait_for(done.communicate(), LIMIT_S)
    assert done.returncode == 0, err.decode()
    assert json.loads(out)["usage"]["completion_tokens"] == 20

    # its state directory knows the server and no password
    (tmp_path / "kvrelay.toml").unlink()
    done = await kvrelay(tmp_path, *ask, "--state-dir", "state")
    _, err = await asyncio.wait_for(done.communicate(), LIMIT_S)
    assert done.returncode == 1
    assert own_nats_server.url in err.decode() and "--nats-url" in err.decode()

    up.terminate()
    _, err = await asyncio.wait_for(up.communicate(), LIMIT_S)
    assert (up.returncode, err) == (0, b"")
    assert own_nats_server.process.returncode is None, "a server that is not ours goes on"
    assert "Violation" not in (tmp_path / "nats" / LOG).read_text()
