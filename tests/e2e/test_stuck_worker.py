"""A worker whose compute thread never comes back ends itself, though its event loop is well and heartbeats go out."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from nats.aio.msg import Msg

from shared import wire
from shared.messages import Heartbeat
from tests.support.engines import TestGateway, prompt
from tests.support.node import Node
from tests.support.tiny_models import folder

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0
PROCESS = """
import ctypes
from services.prefill.actor import PrefillActor
from shared.run import run_worker
from shared.settings import PrefillSettings

class Stuck(PrefillActor):
    async def setup(self):
        await super().setup()
        self.engine.add = self.hang
    def hang(self, *_):
        while True:
            ctypes.CDLL(None).pause()  # a native call that never returns, as of a GPU that does not answer

run_worker(PrefillSettings, lambda: Stuck)
"""


async def test_a_worker_that_hangs_is_alive_until_the_limit_and_then_ends_with_code_1(tmp_path: Path) -> None:
    folder(tmp_path / "model", "llama")
    settings = {"model": str(tmp_path / "model"), "dtype": "float32"}
    async with AsyncExitStack() as stack:
        node = await Node.start(tmp_path / "state", stack)
        await node.manager(**settings)
        gateway = TestGateway(await node.connect("admin"))
        beats: asyncio.Queue[Heartbeat] = asyncio.Queue()

        async def heard(msg: Msg) -> None:
            beat = wire.decode(msg.data, Heartbeat)
            if beat.actor == "prefill" and beat.ready:
                beats.put_nowait(beat)

        await gateway.bus.subscribe("event.actor.heartbeat", heard)
        variables = {**settings, "state_dir": str(node.state_dir), "threads": "1", "compute_timeout_s": str(LIMIT_S)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROCESS, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", **{f"KVRELAY_{name.upper()}": value for name, value in variables.items()}},
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                await beats.get()
                await gateway.send(gateway.work(prompt(20), 4))
                began, before = asyncio.get_running_loop().time(), beats.qsize()
                assert process.stderr is not None
                log = (await process.stderr.read()).decode()
                assert await process.wait() == 1, log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert asyncio.get_running_loop().time() - began >= LIMIT_S * 0.9
        assert beats.qsize() > before, "its heartbeats did not tell"
    said = json.loads([line for line in log.splitlines() if line.startswith("{")][-1])
    assert (said["level"], said["event"]) == ("error", "the compute thread hangs")
    assert said["setting"] == "compute_timeout_s" and "in hang" in said["stack"]
