"""What the command line writes: answers to stdout, everything about them to stderr, JSON unadorned."""

from __future__ import annotations

import io
import json
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@cache
def out() -> Console:
    """stdout, for tables and answers."""
    from rich.console import Console

    return Console(soft_wrap=False)


@cache
def err() -> Console:
    """stderr, for progress and complaints."""
    from rich.console import Console

    return Console(stderr=True)


def never_fail_on_characters() -> None:
    """From now on a character that the terminal's encoding does not have is a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_json(value: Any) -> None:
    """One JSON document on stdout, on one line when somebody else's program reads it."""
    unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    text = json.dumps(value, ensure_ascii=not unicode, indent=2 if sys.stdout.isatty() else None)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """An error, whole and unwrapped, so that it can be searched for."""
    err().print("error:", style="bold red", end=" ")
    err().print(text, markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Something that is probably not meant, but does not stop anything."""
    err().print("warning:", style="yellow", end=" ")
    err().print(text, markup=False, highlight=False, soft_wrap=True)


def size(count: float) -> str:
    """Bytes for people: 1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
