"""A gateway that answers at the pace it is told to, and connections in a role, for tests of the bus itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from infra.nats.server import NatsServer
from shared.actor import Actor, Call, handles
from shared.bus import Bus
from tests.support.actors import Ask


async def connect(server: NatsServer, role: str = "admin", password: str | None = None) -> Bus:
    """A bus in the role's name, with the role's password unless another is given. The caller closes it."""
    login = server.credentials.roles[role]
    return await Bus.connect(server.url, user=role, password=password or login.password, name=role)


class Gateway(Actor):
    """`generate` answers after `count` milliseconds; `ticks` streams for ever."""

    name = "gateway"

    @handles("generate", Ask)
    async def generate(self, message: Ask, call: Call) -> Ask:
        await asyncio.sleep(message.count / 1000)
        return message

    @handles("ticks", Ask)
    async def ticks(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        while True:
            yield message
            await asyncio.sleep(0.01)


async def ticks(client: Bus, count: int) -> list[Ask]:
    """The first `count` messages of the gateway's stream, which ends then."""
    got: list[Ask] = []
    async with aclosing(client.stream("gateway.ticks", Ask(), Ask)) as stream:
        async for item in stream:
            got.append(item)
            if len(got) == count:
                break
    return got
