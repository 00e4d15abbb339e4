"""`kvrelay models`: what can be served by name, and what is converted already."""

from __future__ import annotations

import json
import signal
import sys
from typing import Annotated, Any

import typer

from services.cli import console
from services.cli.application import application
from services.cli.connection import JsonOption

app = application(invoke_without_command=True)


@app.callback()
def models(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the models known by name and those converted on this machine."""
    if context.invoked_subcommand is not None:
        return
    from shared.errors import Misconfigured
    from shared.models import catalogue

    known: list[dict[str, Any]] = []
    for name in sorted(catalogue.PACKAGED):
        try:
            known.append({"name": name, "installed": True, "source": str(catalogue.resolve(name))})
        except Misconfigured as error:
            known.append({"name": name, "installed": False, "source": error.text})
    converted = [
        {
            "name": model.name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "identity": model.identity,
            "source": model.source,
            "path": str(model.path),
            "bytes": model.bytes,
        }
        for model in catalogue.cached()
    ]
    if as_json:
        console.print_json({"known": known, "converted": converted})
    else:
        _show(known, converted)


@app.command()
def prepare(
    model: Annotated[str, typer.Argument(help="A known name, a GGUF file or a Hugging Face folder.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per step, for programs.")] = False,
) -> None:
    """Convert a model into the cache that all workers share, unless it is there already."""
    from shared.models import files

    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: what is half converted is removed
        signal.signal(number, signal.default_int_handler)
    if as_json:
        ready = files.prepare(model, dtype, _progress_line)
        console.print_json({"path": str(ready.directory), "name": ready.config.name, "identity": ready.identity})
        return
    from services.cli.progress import Bar

    with Bar() as bar:
        ready = files.prepare(model, dtype, bar.update)
    console.out().print(f"{ready.config.name} is ready in {ready.directory}", highlight=False, soft_wrap=True)


def _progress_line(what: str, done: int, total: int) -> None:
    sys.stdout.write(json.dumps({"what": what, "done": done, "total": total}) + "\n")
    sys.stdout.flush()


def _show(known: list[dict[str, Any]], converted: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    names = Table(title="known by name", title_justify="left")
    names.add_column("name")
    names.add_column("source", overflow="fold")
    for model in known:
        names.add_row(model["name"], escape(model["source"]))
    console.out().print(names)
    if not converted:
        console.out().print("none is converted yet; `kvrelay up` or `kvrelay models prepare` does it", style="dim")
        return
    cache = Table(title="converted", title_justify="left")
    for heading in ("name", "architecture", "dtype", "size"):
        cache.add_column(heading)
    cache.add_column("folder", overflow="fold")
    for model in converted:
        row = (model["name"], model["architecture"], model["dtype"], console.size(model["bytes"]), model["path"])
        cache.add_row(*map(escape, row))
    console.out().print(cache)
