"""Waiting for what happens in another task or process, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(true: Callable[[], object], limit_s: float = 5.0) -> None:
    """Returns once `true()` is; raises TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.005)
