"""Asks the gateway's HTTP door whether it would serve a request now."""

from __future__ import annotations

import asyncio

POLL_S = 0.05
ANSWER_LIMIT_S = 5.0


async def until_healthy(host: str, port: int) -> None:
    """Returns once `GET /health` answers 200."""
    while await _status(host, port) != 200:  # noqa: ASYNC110  # another process's state: no event to wait for
        await asyncio.sleep(POLL_S)


def bracketed(host: str) -> str:
    """`host` as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


async def _status(host: str, port: int) -> int:
    """The status code of `GET /health`; 0 if nobody answers."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_connection(reachable, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {bracketed(host)}\r\nConnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
