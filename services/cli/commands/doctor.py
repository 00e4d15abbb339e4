"""`kvrelay doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from services.cli import console
from services.cli.connection import JsonOption, NamespaceOption, NatsUrlOption, StateDirOption, Where, connected, run
from services.cli.machine import Finding, findings
from shared.errors import KvrelayError, Misconfigured

app = typer.Typer(add_completion=False)
TABLE_SHARE_LIMIT = 0.1
FORMATS = ("auto", "int8", "int8_channel", "k16v4", "int4")


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
    from shared.models.catalogue import cache_root
    from shared.pool.shm import directory

    report = [*findings(cache_root(), directory()), run(_nats(Where(state, nats_url, namespace))), *_geometry()]
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
    """Bytes per cached token of the demo model (or the configured one) in the common formats."""
    from kernels.layout import page_layout, parse_kv_cache_dtype
    from shared import settings
    from shared.models.catalogue import cached

    wanted = settings.load(settings.BlockManagerSettings)
    config = _config(wanted.model, [model.path for model in cached()])
    if config is None:
        return [Finding("KV auto", "ok", f"{wanted.model} is not converted yet", "kvrelay models prepare")]
    found = []
    for name in dict.fromkeys((wanted.kv_cache_dtype, *FORMATS)):
        k_format, v_format = parse_kv_cache_dtype(name)
        shape = (wanted.block_size, config.layers, config.kv_heads, config.head_dim)
        layout = page_layout(k_format, v_format, *shape)
        share = layout.table_share()
        value = f"{layout.bytes_per_token():,.0f} bytes per token, {k_format}/{v_format}, table {share:.3%}"
        if share > TABLE_SHARE_LIMIT:
            fix = f"the block table takes {share:.0%} of the cache: use --block-size 32"
            found.append(Finding(f"KV {name}", "warn", value, fix))
        else:
            found.append(Finding(f"KV {name}", "ok", value))
    return found


def _config(model: str, converted: list[Path]) -> Any:
    """The configuration of `model` if a conversion of it is in the cache; None otherwise."""
    import json

    from shared.models.catalogue import MANIFEST, resolve
    from shared.models.config import ModelConfig

    try:
        source = str(resolve(model))
    except Misconfigured:
        return None
    for folder in converted:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["source"] == source:
            return ModelConfig.from_json(manifest["config"])
    return None


def _show(report: list[Finding]) -> None:
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
    table = Table(show_header=False, box=None, pad_edge=False)
    for column in ("name", "level", "value"):
        table.add_column(column, overflow="fold")
    for finding in report:
        table.add_row(finding.name, marks[finding.level], finding.value)
        if finding.fix:
            table.add_row("", "", f"→ {finding.fix}", style="dim")
    console.out().print(table)
