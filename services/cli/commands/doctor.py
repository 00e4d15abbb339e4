"""`kvrelay doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from services.cli import console
from services.cli.application import application
from services.cli.connection import JsonOption, NamespaceOption, NatsUrlOption, StateDirOption, Where, connected, run
from services.cli.machine import Finding, findings
from shared.errors import KvrelayError, Misconfigured

app = application()


@app.command()
def doctor(
    as_json: JsonOption = False,
    state: StateDirOption = None,
    nats_url: NatsUrlOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Check packages, cores, instructions, memory, GPU, compiler, NATS and the cache geometry.

    Exit code 1 if something must be fixed.
    """
    from shared.models.catalogue import models_dir
    from shared.pool.shm import directory

    report = [*findings(models_dir(), directory()), run(_nats(Where(state, nats_url, namespace))), *_geometry()]
    if as_json:
        console.print_json({"ok": not _broken(report), "findings": [asdict(finding) for finding in report]})
    else:
        _show(report)
    if _broken(report):
        raise typer.Exit(1)


def _broken(report: list[Finding]) -> bool:
    return any(finding.level == "fail" for finding in report)


async def _nats(where: Where) -> Finding:
    try:
        async with connected("client", where) as bus:
            return Finding("pipeline", "ok", f"NATS answers at {bus.connection.client.connected_url.netloc}")
    except Misconfigured as error:
        return Finding("pipeline", "ok", "none is running", error.text)
    except KvrelayError as error:
        return Finding("pipeline", "fail", error.text, "restart `kvrelay up`, or correct --nats-url and its password")


def _geometry() -> list[Finding]:
    """What a cached token of the configured model costs, as configured and in the common formats."""
    from services.cli import geometry
    from shared import settings
    from shared.models.files import converted_config

    try:
        wanted = settings.load(settings.BlockManagerSettings)
    except Misconfigured as error:
        return [Finding("settings", "fail", error.text, "correct the setting")]
    try:
        config = converted_config(wanted.model)
    except Misconfigured as error:
        return [Finding("model", "fail", error.text, "install it, or correct the setting")]
    if config is None:
        return [Finding("KV cache", "ok", f"{wanted.model} is not converted yet", "kvrelay models prepare")]
    return geometry.findings(config, wanted)


def _show(report: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
    table = Table(show_header=False, box=None, pad_edge=False)
    for column in ("name", "level", "value"):
        table.add_column(column, overflow="fold")
    for finding in report:
        table.add_row(finding.name, marks[finding.level], escape(finding.value))
        if finding.fix:
            table.add_row("", "", escape(f"→ {finding.fix}"), style="dim")
    console.out().print(table)
