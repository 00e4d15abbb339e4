"""Converts the model before anything is started, in a process of its own: the supervisor stays small."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

from services.cli.child import die_with_parent
from services.cli.progress import Bar
from shared.errors import Misconfigured

TIDY_S = 3.0
"""How long an interrupted conversion may take to remove what it has written."""


async def prepare(model: str, dtype: str) -> None:
    """Returns once the model is in the cache, showing progress. Raises Misconfigured with what is wrong with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        "models",
        "prepare",
        model,
        "--dtype",
        dtype,
        "--json",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    assert process.stdout is not None and process.stderr is not None
    complaint = asyncio.create_task(process.stderr.read())
    try:
        with Bar() as bar:
            async for line in process.stdout:
                step = json.loads(line)
                if "what" in step:
                    bar.update(step["what"], step["done"], step["total"])
        code = await process.wait()
    finally:
        await _end(process)
        text = (await complaint).decode(errors="replace").strip()
    if code:
        raise Misconfigured(text.removeprefix("error:").strip() or f"preparing the model ended with code {code}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Harmless if it has ended."""
    for number, patience_s in ((signal.SIGTERM, TIDY_S), (signal.SIGKILL, None)):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
