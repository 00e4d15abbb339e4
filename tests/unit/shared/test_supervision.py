"""Restarts with an intensity, on a clock the test moves."""

from __future__ import annotations

import asyncio

import pytest

from shared.supervision import Intensity, supervise
from tests.support.manual_clock import ManualClock, settle


def test_intensity_forgets_what_left_the_window() -> None:
    intensity = Intensity(max_restarts=2, window_s=10)
    assert intensity.restart(0.0) == pytest.approx(0.05)
    assert intensity.restart(1.0) == pytest.approx(0.1)
    assert intensity.restart(10.5) is not None
    assert intensity.restart(10.6) is None


async def test_a_loop_is_made_anew_until_it_returns() -> None:
    clock, made = ManualClock(), []

    async def loop() -> None:
        made.append(len(made))
        if len(made) < 3:
            raise RuntimeError("broken")

    task = asyncio.create_task(supervise("loop", loop, clock))
    await settle()
    assert made == [0]
    await clock.advance(0.05)
    assert made == [0, 1]
    await clock.advance(0.1)
    assert made == [0, 1, 2]
    await task


async def test_a_hopeless_loop_is_given_up_with_its_last_error() -> None:
    clock, made = ManualClock(), []

    async def loop() -> None:
        made.append(1)
        raise RuntimeError(f"failure {len(made)}")

    task = asyncio.create_task(supervise("loop", loop, clock, Intensity(max_restarts=3, window_s=1000)))
    await settle()
    await clock.advance(100)
    with pytest.raises(RuntimeError, match="failure 4"):
        await task


async def test_cancelling_the_supervisor_cancels_the_loop() -> None:
    ended = asyncio.Event()

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(supervise("loop", loop, ManualClock()))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ended.is_set()
