"""How every command of the command line is made."""

from __future__ import annotations

from typing import Any

import typer


def application(**options: Any) -> typer.Typer:
    """A Typer whose help and complaints are plain text: flags are whole at any width, and a complaint is one line."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **options)
