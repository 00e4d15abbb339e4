"""Waiting for what happens in another task or process, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(true: Callable[[], object], limit_s: float = 15.0) -> None:
    """Returns once `true()` is; raises TimeoutError after `limit_s`.

    The default is against hanging, on however busy a machine; where it matters how soon, give the limit.
    """
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.005)
