"""The compute thread: commands between steps, in order; results on the loop; a crash is said once."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from shared.compute_thread import LOOK_S, ComputeThread
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until


async def test_commands_run_between_steps_and_calls_return_results() -> None:
    log: list[str] = []
    work = 0

    def step() -> bool:
        nonlocal work
        log.append(f"step {threading.current_thread().name}")
        work -= 1
        return work > 0

    def add(count: int) -> str:
        nonlocal work
        work = count
        log.append("add")
        return "added"

    thread = ComputeThread("t", step, lambda error: pytest.fail(str(error)))
    thread.start(asyncio.get_running_loop())
    assert await thread.call(add, 3) == "added"
    await until(lambda: work <= 0)
    thread.submit(log.append, "last")
    await thread.stop()
    steps = [entry for entry in log if entry.startswith("step")]
    assert log[0] == "add" and set(steps) == {"step t"} and len(steps) >= 3
    await thread.stop()  # once is enough, twice is harmless
    with pytest.raises(ZeroDivisionError):
        other = ComputeThread("u", lambda: False, lambda error: None)
        other.start(asyncio.get_running_loop())
        try:
            await other.call(lambda: 1 // 0)
        finally:
            assert await other.call(lambda: 5) == 5  # what a caller waits for does not end the thread
            await other.stop()


async def test_a_failing_step_ends_the_thread_and_is_reported_on_the_loop() -> None:
    crashed: asyncio.Future[tuple[BaseException, str]] = asyncio.get_running_loop().create_future()

    def step() -> bool:
        raise RuntimeError("broken")

    thread = ComputeThread("t", step, lambda e: crashed.set_result((e, threading.current_thread().name)))
    thread.start(asyncio.get_running_loop())
    thread.submit(lambda: None)
    error, where = await asyncio.wait_for(crashed, 5)
    assert str(error) == "broken" and where == threading.current_thread().name
    await thread.stop()


async def test_an_idle_thread_does_nothing() -> None:
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        return False

    thread = ComputeThread("t", step, lambda error: None)
    thread.start(asyncio.get_running_loop())
    await thread.call(lambda: None)
    await asyncio.sleep(0.05)
    assert steps <= 1
    await thread.stop()


class Held:
    """A thread whose work waits for the test, and the watch over it, by a clock that the test moves."""

    LIMIT_S = 10.0

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.begun: queue.Queue[None] = queue.Queue()
        self.may_end = threading.Semaphore(0)
        self.steps_left = 0
        self.thread = ComputeThread("t", self.step, lambda error: None)
        self.thread.start(asyncio.get_running_loop())
        self.watch = asyncio.ensure_future(self.thread.stalled(self.LIMIT_S, self.clock))

    def work(self, steps: int = 0) -> None:
        self.steps_left = max(self.steps_left, steps)
        self.begun.put(None)
        assert self.may_end.acquire(timeout=20)

    def step(self) -> bool:
        if self.steps_left:
            self.work()
            self.steps_left -= 1
        return self.steps_left > 0

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.begun.get, True, 20)

    async def pass_time(self, seconds: float) -> bool:
        """Whether the watch has noticed something by then."""
        await self.clock.advance(seconds)
        return self.watch.done()

    async def end(self) -> None:
        self.may_end.release(99)
        self.watch.cancel()
        await self.thread.stop()


@pytest.fixture
async def held() -> Any:
    one = Held()
    yield one
    await one.end()


async def test_one_piece_of_work_that_lasts_too_long_is_noticed_and_the_place_is_told(held: Held) -> None:
    held.thread.submit(held.work)
    await held.until_begun()
    assert not await held.pass_time(held.LIMIT_S - LOOK_S)
    assert await held.pass_time(2 * LOOK_S)
    assert "in work" in await held.watch and __file__ in await held.watch


async def test_many_pieces_of_work_may_last_as_long_as_they_like_together(held: Held) -> None:
    held.thread.submit(held.work, 5)
    for _ in range(6):  # the command and five steps
        await held.until_begun()
        assert not await held.pass_time(held.LIMIT_S - LOOK_S)
        held.may_end.release()
    assert not await held.pass_time(0)
    held.thread.submit(held.work)
    await held.until_begun()
    assert await held.pass_time(held.LIMIT_S + LOOK_S)


async def test_neither_idleness_nor_what_is_awaited_nor_the_end_by_a_failure_is_a_stall(held: Held) -> None:
    assert not await held.pass_time(100 * held.LIMIT_S)
    loading = asyncio.ensure_future(held.thread.call(held.work))
    await held.until_begun()
    assert not await held.pass_time(100 * held.LIMIT_S)
    held.may_end.release()
    await loading
    held.thread.submit(lambda: None)
    await until(lambda: held.thread._begun >= 3 and held.thread._in_hand is None)
    assert not await held.pass_time(100 * held.LIMIT_S)
    held.thread.submit(lambda: 1 // 0)
    await asyncio.to_thread(held.thread._thread.join, 20)
    assert not await held.pass_time(100 * held.LIMIT_S)
