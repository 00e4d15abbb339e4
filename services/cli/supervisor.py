"""Keeps processes alive: starts them, sees them end, starts them again, stops them in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from services.cli.backoff import Backoff
from shared.errors import KvrelayError, Misconfigured


class Process(Protocol):
    """What can be kept alive. `start` may be called again once `wait` has returned."""

    @property
    def name(self) -> str: ...

    @property
    def lived_s(self) -> float: ...

    async def start(self) -> None: ...

    async def wait(self) -> int: ...

    async def stop(self, patience_s: float) -> None: ...

    def kill(self) -> None: ...

    def last_words(self) -> list[str]: ...


HOPELESS = 2
"""Exit code of an actor whose settings, credentials or permissions are wrong."""
TRIES = 3

OnExit = Callable[[Process, int, float], Awaitable[None]]


class Supervisor:
    """A set of children. `watch` starts one and keeps it alive until `stop`.

    Before `settled()` was called, a child that says its configuration is wrong (`HOPELESS`), or ends by itself with an
    error more than `TRIES` times, is a failure of the whole: `failure()` raises. Later every exit means a restart.
    """

    def __init__(self, on_exit: OnExit) -> None:
        """`on_exit(child, code, delay_s)` is awaited the moment a child has ended, before it is started again."""
        self._on_exit = on_exit
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._children: dict[str, Process] = {}
        self._settled = False
        self._stopping: set[str] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def watch(self, child: Process) -> None:
        """Starts `child`, raising what prevents that, and keeps it alive from then on."""
        await child.start()
        self._children[child.name] = child
        self._tasks[child.name] = asyncio.create_task(self._keep(child), name=f"keep-{child.name}")

    def settled(self) -> None:
        """From now on every exit is followed by a restart."""
        self._settled = True

    async def failure(self) -> None:
        """Waits for ever, or raises what makes going on pointless."""
        await asyncio.shield(self._failed)

    async def stop(self, order: Iterable[tuple[Iterable[str], float]]) -> None:
        """Stops children group by group; each group is (names, seconds of patience before SIGKILL)."""
        for names, patience_s in order:
            present = [self._children[name] for name in names if name in self._children]
            self._stopping |= {child.name for child in present}
            await asyncio.gather(*(child.stop(patience_s) for child in present))
            tasks = [self._tasks[child.name] for child in present]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(child.stop(patience_s) for child in present))  # what a restart had just begun

    def kill(self) -> None:
        """SIGKILL to everything; `stop` then returns soon."""
        self._stopping |= set(self._children)
        for child in self._children.values():
            child.kill()

    async def _keep(self, child: Process) -> None:
        backoff = Backoff()
        failures = 0
        while True:
            code = await child.wait()
            if child.name in self._stopping:
                return
            failures += code > 0
            if not self._settled and (code == HOPELESS or failures > TRIES) and not self._failed.done():
                self._failed.set_exception(Misconfigured(f"{child.name} could not start: {explain(child)}"))
                return
            delay_s = backoff.next_delay(child.lived_s)
            await self._on_exit(child, code, delay_s)
            await asyncio.sleep(delay_s)
            while child.name not in self._stopping:
                try:
                    await child.start()
                    break
                except (OSError, KvrelayError):  # no memory for a fork, port still taken: the next try may do
                    await asyncio.sleep(backoff.next_delay(0.0))


def explain(child: Process) -> str:
    """Why `child` ended, in its own words: what it complained about last."""
    for line in reversed(child.last_words()):
        try:
            record = json.loads(line)
        except ValueError:
            return line.removeprefix(f"{child.name}: ")
        if isinstance(record, dict) and record.get("level") in ("error", "critical"):
            raised = str(record.get("exception", "")).strip().rpartition("\n")[2]
            return ": ".join(filter(None, (str(record.get("event", "")), raised)))
    return "it left no message"
