"""The compute thread: commands between steps, in order; results on the loop; a crash is said once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.compute_thread import ComputeThread


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
    while work > 0:
        await asyncio.sleep(0.001)
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
