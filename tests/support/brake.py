"""Holds a worker's model still, so that a test looks at a moment instead of racing with it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shared.models.native import nothing

HELD_LIMIT_S = 60.0


class Brake:
    """Lets the next `passes` forward passes of `model` through and holds the others until told.

    A held pass blocks its compute thread, which takes no commands meanwhile: release it before waiting for an end. What
    the engine has to do meanwhile is done, as when the pass computes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, passes: int = 0) -> None:
        self._changed = threading.Condition()
        self._left: float = passes
        self._forward = model.forward
        monkeypatch.setattr(model, "forward", self._held)

    def allow(self, passes: float) -> None:
        """So many more."""
        with self._changed:
            self._left += passes
            self._changed.notify_all()

    def release(self) -> None:
        """All from now on."""
        self.allow(math.inf)

    def _held(self, *arguments: Any, meanwhile: Callable[[], None] = nothing) -> Any:
        meanwhile()
        with self._changed:
            if not self._changed.wait_for(lambda: self._left > 0, HELD_LIMIT_S):
                raise AssertionError("the test never released the model")
            self._left -= 1
        return self._forward(*arguments)
