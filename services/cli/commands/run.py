"""`kvrelay run <actor>`: one actor in this process, for a Procfile or another machine."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from infra.nats.roles import ACTORS
from services.cli.application import application
from services.cli.connection import with_login
from services.cli.options import KINDS, environment, known, with_settings
from shared import settings

app = application()


def run(flags: dict[str, Any], actor: Annotated[str, typer.Argument(help=f"One of {', '.join(ACTORS)}.")]) -> None:
    """Run one actor of a pipeline whose NATS server is there already."""
    if actor not in KINDS:
        raise typer.BadParameter(f"{actor!r} is none of {', '.join(ACTORS)}", param_hint="ACTOR")
    kind = KINDS[actor]
    access = with_login(settings.load(kind, flags))  # refuses flags of other actors
    login = {"nats_url": access.nats_url, "nats_user": access.nats_user, "nats_password": access.nats_password}
    child = environment({**known(kind, flags), **login})
    os.execve(sys.executable, [sys.executable, "-m", f"services.{actor}"], {**os.environ, **child})


app.command()(with_settings(KINDS.values(), run))
