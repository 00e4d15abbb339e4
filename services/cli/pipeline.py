"""`kvrelay up` at work: model, NATS, five actors; ready; restarts; an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.nats.roles import ACTORS
from infra.nats.server import NatsServer
from services.cli.child import Child, die_with_parent
from services.cli.health import bracketed, until_healthy
from services.cli.model import prepare
from services.cli.readiness import Readiness
from services.cli.report import Report
from services.cli.state_dir import StateDir
from services.cli.supervisor import Process, Supervisor
from shared import wire
from shared.bus import Bus
from shared.errors import KvrelayError
from shared.messages import ActorExited, Heartbeat
from shared.settings import GatewaySettings, connection

REMIND_S = 10.0
KILL_GRACE_S = 5.0
SERVER_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Plan:
    """What to run. `environment` carries the flags to the actors; `workers` counts the processes per actor."""

    settings: GatewaySettings
    environment: Mapping[str, str]
    nats_port: int
    workers: Mapping[str, int]


class Pipeline:
    """One run, from an empty state directory to an empty state directory."""

    def __init__(self, plan: Plan, state: StateDir, report: Report) -> None:
        self._plan = plan
        self._state = state
        self._report = report
        self._readiness = Readiness()
        self._changed = asyncio.Event()
        self._bus: Bus | None = None
        self._nats_url = ""
        self._children: dict[str, Child] = {}
        self._supervisor = Supervisor(self._on_exit)
        self._stop = asyncio.Event()
        self._began = time.monotonic()

    async def run(self) -> None:
        """Runs until a signal asks to stop. Raises what makes the pipeline impossible; nothing is left either way."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(one) for one in (self._work(), self._supervisor.failure(), self._stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shut_down()
        for task in done:
            task.result()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._report.say("killing", "stopping at once", style="yellow")
            self._supervisor.kill()
        self._stop.set()

    async def _work(self) -> None:
        settings = self._plan.settings
        await prepare(settings.model, settings.dtype)
        await asyncio.to_thread(_check_cache, settings)
        await self._start_nats()
        await self._start_actors()
        await self._until_ready()
        self._supervisor.settled()
        await self._stop.wait()

    async def _start_nats(self) -> None:
        settings = self._plan.settings
        if settings.nats_url is None:
            server = NatsServer(
                settings.state_dir,
                port=self._plan.nats_port,
                namespace=settings.namespace,
                preexec=die_with_parent(),
            )
            await self._supervisor.watch(server)
        access = connection(settings, "admin")
        self._bus = await Bus.connect(
            access.url, user=access.user, password=access.password, name="kvrelay-up", namespace=settings.namespace
        )
        await self._bus.subscribe("event.actor.heartbeat", self._on_heartbeat)
        self._nats_url = access.url
        self._report.say("nats", f"nats      {access.url}", url=access.url)

    async def _start_actors(self) -> None:
        for actor in ACTORS:
            for number in range(1, self._plan.workers.get(actor, 1) + 1):
                name = actor if number == 1 else f"{actor}-{number}"
                log = self._state.log(name)
                log.unlink(missing_ok=True)
                child = self._children[name] = Child(name, actor, self._plan.environment, log)
                await self._supervisor.watch(child)

    async def _until_ready(self) -> None:
        settings = self._plan.settings
        while waiting := self._readiness.waiting({name: child.instance for name, child in self._children.items()}):
            self._report.busy(f"waiting for {waiting}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), REMIND_S)
            except TimeoutError:
                self._report.say("waiting", f"waiting for {waiting}", style="dim", who=waiting)
        self._report.busy("waiting for the gateway")
        await until_healthy(settings.http_host, settings.http_port)
        self._report.busy("")
        summary = {
            "pid": os.getpid(),
            "http_url": f"http://{bracketed(settings.http_host)}:{settings.http_port}",
            "nats_url": self._nats_url,
            "namespace": settings.namespace,
            "model": settings.model,
            "actors": {actor: self._plan.workers.get(actor, 1) for actor in ACTORS},
        }
        self._state.describe(summary)
        seconds = time.monotonic() - self._began
        self._report.say("http", f"http      {summary['http_url']}", url=summary["http_url"])
        self._report.say("state", f"state     {settings.state_dir}", path=str(settings.state_dir))
        self._report.say(
            "ready",
            f"ready     {settings.model} after {seconds:.1f} s; ask with: kvrelay generate 'Who are you?'",
            style="bold green",
            seconds=round(seconds, 3),
            **summary,
        )

    async def _on_heartbeat(self, message: Any) -> None:
        beat = wire.decode(message.data, Heartbeat)
        mine = {child.instance: name for name, child in self._children.items()}
        if beat.instance not in mine:
            return
        if self._readiness.note(beat):
            self._report.say(
                "actor_ready", f"  {mine[beat.instance]} is ready", style="dim", actor=beat.actor, pid=beat.pid
            )
        self._changed.set()

    async def _on_exit(self, process: Process, code: int, delay_s: float) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        when = f"in {delay_s:g} s" if delay_s else "now"
        self._report.say(
            "exited", f"{process.name} ended ({how}); starting it again {when}", style="yellow",
            name=process.name, code=code, delay_s=delay_s,
        )  # fmt: skip
        if not isinstance(process, Child):
            return
        self._readiness.forget(process.instance)
        gone = ActorExited(actor=process.actor, instance=process.instance, pid=process.pid, code=code)
        try:
            if self._bus is not None:
                await self._bus.publish("event.actor.exited", gone)
        except KvrelayError as error:  # its silence will tell the others, later
            self._report.say("untold", f"nobody could be told: {error.text}", style="dim", name=process.name)

    async def _shut_down(self) -> None:
        """The door first, then who computes, then who holds memory, then the wire."""
        self._report.busy("")
        patience_s = self._plan.settings.drain_timeout_s + KILL_GRACE_S
        names = {actor: [name for name, child in self._children.items() if child.actor == actor] for actor in ACTORS}
        if self._children:
            self._report.say("stopping", "stopping", style="dim")
        await self._supervisor.stop(
            [
                (names["gateway"], patience_s),
                (names["prefill"] + names["decode"], patience_s),
                (names["offload"], patience_s),
                (names["block_manager"], patience_s),
            ]
        )
        if self._bus is not None:
            await self._bus.close()
        await self._supervisor.stop([([NatsServer.name], SERVER_PATIENCE_S)])
        self._remove_memory()

    def _remove_memory(self) -> None:
        """A block manager that was killed leaves its shared memory behind; nobody can use it any more."""
        from shared.pool.shm import pool_path

        settings = self._plan.settings
        for pool in {settings.prefill_pool, settings.decode_pool}:
            path = pool_path(pool, settings.state_dir)
            for left in path.parent.glob(f"{path.name}*"):
                left.unlink(missing_ok=True)


def _check_cache(settings: GatewaySettings) -> None:
    """Raises Misconfigured now for what every actor would refuse one after another: formats, layers, scale file."""
    from shared.models import files
    from shared.pool.layout import layout_for

    layout_for(files.prepare(settings.model, settings.dtype), settings)
