"""What `kvrelay up` tells: sentences for people, one JSON object a line for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from services.cli import console

if TYPE_CHECKING:
    from rich.status import Status


class Report:
    """Where the events of one run go. That nobody listens any more is no reason to stop serving."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._spinner: Status | None = None

    def say(self, event: str, text: str, *, style: str = "", **fields: Any) -> None:
        """One event: its name and `fields` for programs, `text` for people."""
        with _perhaps_unheard():
            if self._as_json:
                sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
                sys.stdout.flush()
            else:
                console.out().print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def busy(self, text: str) -> None:
        """What a person is waiting for, on a terminal; an empty text: nothing any more."""
        with _perhaps_unheard():
            if self._spinner is not None and text:
                self._spinner.update(text)
            elif self._spinner is not None:
                self._spinner.stop()
                self._spinner = None
            elif text and not self._as_json and console.out().is_terminal:
                self._spinner = console.out().status(text)
                self._spinner.start()


@contextmanager
def _perhaps_unheard() -> Iterator[None]:
    """If the terminal was closed, the reader of the pipe has gone or the disk is full, stdout leads nowhere from then
    on: what is still in its buffer would fail again, at the latest when the process ends."""
    try:
        yield
    except (OSError, SystemExit):  # rich makes the second of a broken pipe
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
