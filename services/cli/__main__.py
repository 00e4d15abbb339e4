"""`kvrelay` and `python -m services.cli`. Exit codes: 0 done, 2 usage, 1 anything else."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from services.cli import commands, console
from services.cli.application import application
from shared.errors import KvrelayError
from shared.settings import WrongFlag

INTERRUPTED = 130
"""What Typer makes of Ctrl-C."""


class Commands(TyperGroup):
    """One command per file of `services/cli/commands`, imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"services.cli.commands.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = application(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.out().print(version("kvrelay"), highlight=False)
        raise typer.Exit


@app.callback()
def kvrelay(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models from actors that hand each other KV-cache blocks by handle over NATS."""


def main() -> None:
    """Runs the command line. An error meant for the user is one line on stderr, never a traceback."""
    console.never_fail_on_characters()
    try:
        app(prog_name="kvrelay")
    except KvrelayError as error:
        console.complain(error.text)
        sys.exit(2 if isinstance(error, WrongFlag) else 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # most likely stdout is a file on a full disk
        console.complain(f"{error.filename or 'output'}: {error.strerror or error}")
        sys.exit(1)
    except SystemExit as end:
        sys.exit(1 if end.code == INTERRUPTED else end.code)


if __name__ == "__main__":
    main()
