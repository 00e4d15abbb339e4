"""`make demo`: starts everything, asks over NATS twice, shows the answers and what they took, leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared import logs, settings
from shared.bus import Bus
from shared.errors import KvrelayError, Misconfigured
from shared.messages import ChatMessage, Generate, Generated, Sampling

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
MAX_TOKENS = 160
SYSTEM = """You are a patient teacher who answers questions about computers. Follow these rules in every answer.
Write plain English that a student of fifteen understands. Prefer short sentences to long ones. Answer the question that
was asked before you explain anything around it. When a technical word cannot be avoided, say what it means the first
time you use it. Use an example from everyday life when it helps, such as a library, a kitchen or a post office. Do not
use lists, headings or tables. Do not repeat the question. Do not apologise. If you are not sure, say so in one sentence
and go on with what you do know. Stay with the facts. Finish every answer with a complete sentence."""
QUESTIONS = ("What is a computer network?", "What is a database?")

console = Console(highlight=False)


async def main() -> None:
    """The whole demonstration. Raises KvrelayError with what went wrong."""
    logs.setup("error")
    demo = asyncio.current_task()
    assert demo is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # Ctrl-C cancels it by itself
        asyncio.get_running_loop().add_signal_handler(number, demo.cancel)
    with tempfile.TemporaryDirectory(prefix="kvrelay-demo-") as folder:
        state = Path(folder) / "state"
        console.print("[bold]kvrelay[/]: a NATS server and five actors, one model, handles instead of tensors\n")
        async with pipeline(state) as ready:
            console.print(
                f"ready after {ready['seconds']:.1f} s: {ready['model']} at {ready['nats_url']}\n", style="dim"
            )
            answers = [await ask(state, question) for question in QUESTIONS]
        console.print(summary(answers))
        console.print("everything stopped, nothing left running", style="dim")


@asynccontextmanager
async def pipeline(state: Path) -> AsyncIterator[dict[str, Any]]:
    """A running `kvrelay up`; gives what it said when it was ready. Checks that it leaves cleanly."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", "--json", "--state-dir", str(state)),
        *("--http-port", "0", "--nats-port", "0"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT_S):
            ready, pids = await _until_ready(process.stdout)
        yield ready
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        rest = asyncio.create_task(process.stdout.read())
        try:
            code = await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        await rest
    left = [f"{actor} ({pid})" for pid, actor in pids.items() if _alive(pid)]
    if code or left:
        raise Misconfigured(f"kvrelay up ended with code {code}; still running: {', '.join(left) or 'nothing'}")


async def _until_ready(lines: asyncio.StreamReader) -> tuple[dict[str, Any], dict[int, str]]:
    """What `up` said when it was ready, and the pids of the actors it had heard of by then."""
    pids: dict[int, str] = {}
    async for line in lines:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "actor_ready":
            pids[event["pid"]] = event["actor"]
            console.print(f"  {event['actor']} is ready", style="dim")
        if event["event"] == "ready":
            return event, pids
    raise Misconfigured("the pipeline did not start; its complaint is above")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ask(state: Path, question: str) -> Generated:
    """Publishes one chat request to `kvrelay.gateway.generate` and prints the answer as it comes; its last event."""
    access = settings.connection(settings.CommonSettings(state_dir=state), "client")
    bus = await Bus.connect(access.url, user=access.user, password=access.password, name="demo")
    request = Generate(
        messages=[ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=question)],
        stream=True,
        max_tokens=MAX_TOKENS,
        sampling=Sampling(temperature=0.0),
    )
    console.print(f"[bold cyan]» {question}[/]")
    last = None
    try:
        async with aclosing(bus.stream("gateway.generate", request, Generated)) as events:
            async for event in events:
                sys.stdout.write(event.text)
                sys.stdout.flush()
                last = event
    finally:
        await bus.close()
    sys.stdout.write("\n\n")
    if last is None or last.usage is None or last.timings is None:
        raise Misconfigured("the stream ended without its last event")
    return last


def summary(answers: list[Generated]) -> Table:
    """What each answer took."""
    table = Table(title="what it took", title_justify="left")
    table.add_column("")
    for number in range(1, len(answers) + 1):
        table.add_column(f"request {number}", overflow="fold")
    rows: dict[str, list[str]] = {}
    for answer in answers:
        usage, timings = answer.usage, answer.timings
        assert usage is not None and timings is not None
        shown = {
            "handled by": ", ".join(answer.actors or ()),
            "prompt tokens": str(usage.prompt_tokens),
            "found in the cache": f"{usage.cached_tokens} tokens",
            "pages used": str(answer.pages),
            "first token after": f"{1000 * timings.ttft_s:.0f} ms",
            "of which compute": f"{1000 * timings.compute_s:.0f} ms",
            "generated": f"{usage.completion_tokens} tokens ({answer.finish_reason})",
            "speed": f"{timings.tokens_per_s:.0f} tokens/s",
            "trace id": answer.trace_id,
        }
        for name, value in shown.items():
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


if __name__ == "__main__":
    began = time.monotonic()
    try:
        asyncio.run(main())
    except (KvrelayError, TimeoutError) as error:
        console.print(f"[bold red]the demo failed:[/] {error or 'it took too long to start'}")
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(1)
    console.print(f"done in {time.monotonic() - began:.1f} s", style="dim")
