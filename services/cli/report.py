"""What `kvrelay up` tells: sentences for people, one JSON object a line for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from services.cli import console


class Report:
    """Where the events of one run go."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, event: str, text: str, *, style: str = "", **fields: Any) -> None:
        """One event: its name and `fields` for programs, `text` for people."""
        if self._as_json:
            sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
            sys.stdout.flush()
        else:
            console.out().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
