"""The one thread of an engine: it steps while there is work, and takes commands between steps.

The event loop never computes and the compute thread never waits for the event loop: commands go in through a queue,
results come back with `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from shared.clock import Clock

T = TypeVar("T")

STOP_LIMIT_S = 5.0
LOOK_S = 1.0


class ComputeThread:
    """Runs `step()` for as long as it returns True; otherwise sleeps until a command arrives.

    If `step` or a command without a waiter raises, `on_crash(error)` is called on the event loop and the thread ends:
    the state of an engine that failed in an unknown place is not worth keeping.
    """

    def __init__(self, name: str, step: Callable[[], bool], on_crash: Callable[[BaseException], None]) -> None:
        self._step = step
        self._on_crash = on_crash
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = 0
        self._in_hand: int | None = None  # number of the step or command that runs now, written by the thread alone
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; results are posted to `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, command: Callable[..., None], *args: Any) -> None:
        """Runs `command(*args)` on the thread, before its next step, in order of submission."""
        self._commands.put(lambda: command(*args))

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """As `submit`, but waits for the result or raises what `function` raised. `stalled` does not count it."""
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            self._in_hand = None
            try:
                result = function(*args)
            except BaseException as error:  # goes to the waiter, whose business it is
                self.post(_settle, future, None, error)
            else:
                self.post(_settle, future, result, None)

        self._commands.put(command)
        return await future

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """From the thread: runs `callback(*args)` on the event loop. Without effect once the loop is closed."""
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def stalled(self, limit_s: float, clock: Clock) -> str:
        """Waits until one step or command has lasted `limit_s` seconds; returns the stack where the thread stands.

        What somebody awaits with `call` (loading, compiling, capturing) takes as long as it takes. Looks are counted
        instead of clocks compared: a process that was stopped for an hour and goes on has not been computing for one.
        """
        look_s = min(LOOK_S, limit_s / 4)
        seen, held_s = self._in_hand, 0.0
        while held_s < limit_s:
            await clock.sleep(look_s)
            now = self._in_hand
            held_s = held_s + look_s if now is not None and now == seen else 0.0
            seen = now
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Ends the thread after the step it is in; pending commands run first. A stuck one is left behind."""
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, limit_s)

    def _run(self) -> None:
        busy = False
        try:
            while self._take_commands(wait=not busy):
                busy = self._do(self._step)
        except BaseException as error:
            self._in_hand = None
            self.post(self._on_crash, error)

    def _do(self, work: Callable[[], T]) -> T:
        self._begun += 1
        self._in_hand = self._begun
        result = work()
        self._in_hand = None
        return result

    def _take_commands(self, wait: bool) -> bool:
        """Runs all waiting commands; False when told to end."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            self._do(command)
            wait = False
        return True


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
