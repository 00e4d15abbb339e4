"""A node whose actors are processes of their own, which tests kill, stop and start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from nats.aio.msg import Msg

from shared import errors, wire
from shared.messages import Heartbeat
from shared.pool import shm
from tests.support.node import Node, Worker


class Processes:
    """`pools` are prefill's and decode's; `environment` is what the processes see beside their settings."""

    def __init__(self, node: Node, pools: tuple[str, str], environment: Mapping[str, str]) -> None:
        self.node, self.pools = node, pools
        self._environment = environment
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, actor: str, **more: str) -> None:
        settings = {
            "STATE_DIR": str(self.node.state_dir),
            "NUM_BLOCKS_OVERRIDE": "32",
            "MAX_NUM_SEQS": "8",
            "PREFILL_POOL": self.pools[0],
            "DECODE_POOL": self.pools[1],
            "INSTANCE": f"{actor}-1",
        }
        environment = {**self._environment, **{f"KVRELAY_{name}": value for name, value in settings.items()}, **more}
        self.running[actor] = subprocess.Popen([sys.executable, "-m", f"services.{actor}"], env=environment)

    def send(self, actor: str, number: int) -> None:
        self.running[actor].send_signal(number)

    def stop(self, actor: str, number: int = signal.SIGTERM) -> int:
        process = self.running.pop(actor)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        return process.wait(10)

    async def ready(self, worker: Worker) -> None:
        """Returns when a hand-over between the pools works."""
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(errors.Unavailable, errors.Timeout):
                    lease = await worker.acquire(self.pools[0], [1, 2, 3], "probe", timeout_s=2)
                    try:
                        await worker.adopt(lease, self.pools[1], timeout_s=4)
                        await worker.renew(lease)  # the last verb that a block manager begins to serve
                        return
                    finally:
                        await worker.release(lease)
                await asyncio.sleep(0.05)

    async def heartbeat(self, actor: str, wanted: Callable[[Heartbeat], bool], limit_s: float = 20.0) -> None:
        """Returns with the next heartbeat of `actor` that is as `wanted`."""
        heard = asyncio.Event()

        async def hear(message: Msg) -> None:
            beat = wire.decode(message.data, Heartbeat)
            if beat.actor == actor and wanted(beat):
                heard.set()

        admin = await self.node.connect("admin")
        subscription = await admin.subscribe("event.actor.heartbeat", hear)
        async with asyncio.timeout(limit_s):
            await heard.wait()
        await admin.unsubscribe(subscription)

    async def copies_settled(self) -> None:
        """Returns when the block manager knows of every copy how it ended."""
        await self.heartbeat("block_manager", lambda beat: beat.details.get("transfers") == 0)


@contextlib.asynccontextmanager
async def processes(
    state_dir: Path, pools: tuple[str, str], environment: Mapping[str, str] = os.environ
) -> AsyncIterator[Processes]:
    """Block manager and mover, ended at the end, when nothing of their pools is left."""
    async with contextlib.AsyncExitStack() as stack:
        running = Processes(await Node.start(state_dir, stack), pools, environment)
        try:
            for actor in ("block_manager", "offload"):
                running.start(actor)
            yield running
        finally:
            for actor in list(running.running):
                running.stop(actor)
            assert [shm.pool_path(name, state_dir).exists() for name in pools] == [False, False]
