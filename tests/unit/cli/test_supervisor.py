"""Restarts with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.child import Child
from services.cli.supervisor import HOPELESS, TRIES, Process, Supervisor, explain
from shared.errors import Misconfigured
from tests.support.processes import alive
from tests.support.waiting import until

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


class Exits:
    """Collects what `on_exit` is told."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[tuple[str, int, float]] = asyncio.Queue()

    async def __call__(self, process: Process, code: int, delay_s: float) -> None:
        self.seen.put_nowait((process.name, code, delay_s))

    async def next(self) -> tuple[str, int, float]:
        return await asyncio.wait_for(self.seen.get(), 10)


def child(tmp_path: Path, code: str, name: str = "decode") -> Child:
    return Child(name, "decode", {}, tmp_path / f"{name}.log", (sys.executable, "-c", code))


async def started(process: Child, after: int) -> int:
    """The pid of a process newer than `after`."""
    await until(lambda: process.alive and process.pid != after)
    return process.pid


async def test_a_killed_child_is_back_at_once_under_a_new_instance_name(tmp_path: Path) -> None:
    exits = Exits()
    supervisor = Supervisor(exits)
    one = child(tmp_path, SLEEP)
    await supervisor.watch(one)
    supervisor.settled()
    pid, instance = one.pid, one.instance
    os.kill(pid, signal.SIGKILL)
    assert await exits.next() == ("decode", -signal.SIGKILL, 0)
    assert await started(one, pid) != pid
    assert one.instance != instance and one.instance.startswith("decode-")
    await supervisor.stop([(["decode"], 5)])
    assert not one.alive


async def test_a_child_that_keeps_dying_is_restarted_ever_later(tmp_path: Path) -> None:
    exits = Exits()
    supervisor = Supervisor(exits)
    await supervisor.watch(child(tmp_path, "raise SystemExit(2)"))
    supervisor.settled()
    assert [(await exits.next())[1:] for _ in range(3)] == [(2, 0), (2, 0.25), (2, 0.5)]
    await supervisor.stop([(["decode"], 5)])


async def test_a_wrong_configuration_at_start_ends_everything_in_its_own_words(tmp_path: Path) -> None:
    supervisor = Supervisor(Exits())
    await supervisor.watch(
        child(tmp_path, f"import sys; print('decode: no room', file=sys.stderr); sys.exit({HOPELESS})")
    )
    with pytest.raises(Misconfigured, match="decode could not start: no room"):
        await asyncio.wait_for(supervisor.failure(), 10)
    await supervisor.stop([(["decode"], 5)])


async def test_other_errors_at_start_get_a_few_tries(tmp_path: Path) -> None:
    exits = Exits()
    supervisor = Supervisor(exits)
    await supervisor.watch(child(tmp_path, "raise SystemExit('lost')"))
    with pytest.raises(Misconfigured, match="lost"):
        await asyncio.wait_for(supervisor.failure(), 20)
    assert exits.seen.qsize() == TRIES
    await supervisor.stop([(["decode"], 5)])


async def test_stop_goes_in_order_and_kills_the_deaf(tmp_path: Path) -> None:
    exits = Exits()
    supervisor = Supervisor(exits)
    deaf, other = child(tmp_path, DEAF, "deaf"), child(tmp_path, SLEEP, "other")
    for one in (deaf, other):
        await supervisor.watch(one)
    await until(lambda: "deaf" in deaf.last_words())
    stopping = asyncio.create_task(supervisor.stop([(["deaf"], 0.3), (["other"], 5)]))
    while deaf.alive:
        assert other.alive, "the second group was stopped before the first had ended"
        await asyncio.sleep(0.01)
    await stopping
    assert not other.alive
    assert exits.seen.empty(), "a stop is not an accident"


async def test_a_stop_during_the_wait_for_a_restart_starts_nothing(tmp_path: Path) -> None:
    exits = Exits()
    supervisor = Supervisor(exits)
    one = child(tmp_path, "")
    await supervisor.watch(one)
    supervisor.settled()
    for _ in range(5):
        await exits.next()
    pid = one.pid
    await supervisor.stop([(["decode"], 5)])
    assert not one.alive and one.pid == pid


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal, sys
from pathlib import Path
from services.cli.child import Child
async def main():
    one = Child("decode", "decode", {{}}, Path(sys.argv[1]), (sys.executable, "-c", {SLEEP!r}))
    await one.start()
    print(one.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True, check=False, timeout=20
    )
    pid = int(done.stdout)
    for _ in range(1000):
        if not alive(pid):
            return
        os.sched_yield()
        subprocess.run(["true"], check=True)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child outlived its supervisor")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "it left no message"),
        ("plain words", "plain words"),
        ('{"level": "info", "event": "stopping"}\ndecode: no such model', "no such model"),
        (
            '{"level": "error", "event": "the actor failed", "exception": "Traceback …\\nOSError: gone"}\n'
            '{"level": "info", "event": "bye"}',
            "the actor failed: OSError: gone",
        ),
    ],
)
async def test_the_reason_is_what_the_process_said_last(tmp_path: Path, lines: str, words: str) -> None:
    one = child(tmp_path, f"print({lines!r})")
    (tmp_path / "decode.log").write_text("of an earlier process\n")
    await one.start()
    await one.wait()
    assert explain(one) == words
