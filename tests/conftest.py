"""Fixtures for everybody: a real NATS server, buses on it, and a real OTLP receiver."""

from __future__ import annotations

import asyncio
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import hypothesis
import pytest
import torch

from infra.nats.server import NatsServer
from services.cli.child import die_with_parent
from shared.bus import Bus
from tests.support.otlp import OtlpReceiver

Connect = Callable[..., Awaitable[Bus]]

hypothesis.settings.load_profile("ci")  # everywhere: the same examples each time, and no deadline a busy machine misses

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # a shell's background job ignores Ctrl-C, and so would everything the tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random tensors are the same in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for the whole run. Tests share it, so each speaks in a `namespace` of its own, as `admin`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="nats-server", daemon=True)
    thread.start()
    server = NatsServer(tmp_path_factory.mktemp("nats"), preexec=die_with_parent())
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.fixture
async def own_nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server for one test, which may stop and start it."""
    server = NatsServer(tmp_path, preexec=die_with_parent())
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def namespace() -> str:
    """A first word of subjects that no other test uses."""
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def connect(nats_server: NatsServer, namespace: str) -> AsyncIterator[Connect]:
    """`await connect()`: one more bus in this test's namespace; closed at its end."""
    async with AsyncExitStack() as stack:

        async def one(role: str = "admin", namespace: str = namespace) -> Bus:
            login = nats_server.credentials.roles[role]
            bus = await Bus.connect(
                nats_server.url, user=login.user, password=login.password, name=role, namespace=namespace
            )
            stack.push_async_callback(bus.close)
            return bus

        yield one


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    """A collector that keeps what it receives."""
    with OtlpReceiver() as receiver:
        yield receiver
