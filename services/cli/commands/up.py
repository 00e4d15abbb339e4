"""`kvrelay up`: the whole pipeline in the foreground."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Annotated, Any

import typer

from infra.nats.server import port_is_free
from services.cli import console, machine
from services.cli.application import application
from services.cli.connection import login_in
from services.cli.options import KINDS, environment, known, misspelt, with_settings
from services.cli.pipeline import Pipeline, Plan
from services.cli.report import Report
from services.cli.state_dir import StateDir
from shared import logs, settings
from shared.errors import Misconfigured
from shared.pool import device_of

app = application()


def up(
    flags: dict[str, Any],
    nats_port: Annotated[int, typer.Option(min=0, max=65_535, help="of the embedded NATS server (0: any free)")] = 0,
    prefill_workers: Annotated[int, typer.Option(min=1, max=64, help="prefill processes")] = 1,
    decode_workers: Annotated[int, typer.Option(min=1, max=64, help="decode processes")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="events as JSON lines on stdout")] = False,
) -> None:
    """Start NATS and all actors, restart what dies, stop everything on Ctrl-C.

    Every setting is also a variable, KVRELAY_<NAME>, and a line of kvrelay.toml.
    """
    for variable, meant in misspelt(os.environ):
        console.warn(f"{variable} is no setting; did you mean {meant}?")
    for kind in KINDS.values():
        settings.load(kind, known(kind, flags))
    if _computes_natively(flags):
        machine.instruction_set()
        if (compiler := machine.compiler()).level != "ok":
            console.warn(f"{compiler.name}: {compiler.value}; {compiler.fix}")
    gateway = settings.load(settings.GatewaySettings, known(settings.GatewaySettings, flags))
    if nats_port and gateway.nats_url is not None:
        raise typer.BadParameter("no server is started when there is a NATS URL", param_hint="--nats-port")
    login = login_in(gateway.nats_url)
    gateway = gateway.model_copy(update={**login, "state_dir": gateway.state_dir.absolute()})
    if gateway.http_port == 0:
        gateway = gateway.model_copy(update={"http_port": _free_port(gateway.http_host)})
    logs.setup("error")
    state = StateDir(gateway.state_dir)
    try:
        if not port_is_free(gateway.http_host, gateway.http_port):
            raise _not_to_be_had(f"{gateway.http_host}:{gateway.http_port}")
        # a user that is not in the URL is each actor's own: it may be in its table of kvrelay.toml
        chosen = {"state_dir": gateway.state_dir, "http_port": gateway.http_port, **login}
        plan = Plan(
            settings=gateway,
            environment=environment({**flags, **chosen}),
            nats_port=nats_port,
            workers={"prefill": prefill_workers, "decode": decode_workers},
        )
        asyncio.run(_run(plan, state, Report(as_json)))
    finally:
        state.close()


def _computes_natively(flags: dict[str, Any]) -> bool:
    prefill = settings.load(settings.PrefillSettings, known(settings.PrefillSettings, flags))
    decode = settings.load(settings.DecodeSettings, known(settings.DecodeSettings, flags))
    workers = ((prefill.kernels, prefill.prefill_pool), (decode.kernels, decode.decode_pool))
    return any(kernels in ("auto", "cpu") and device_of(pool) == "cpu" for kernels, pool in workers)


async def _run(plan: Plan, state: StateDir, report: Report) -> None:
    await Pipeline(plan, state, report).run()


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError:
        raise _not_to_be_had(host) from None


def _not_to_be_had(address: str) -> Misconfigured:
    return Misconfigured(
        f"HTTP address {address} cannot be taken; choose another with --http-host and --http-port (0: any free)"
    )


app.command()(with_settings(KINDS.values(), up))
