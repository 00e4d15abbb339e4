"""The process around one actor: settings, logs, traces, connection, signals, exit code.

0   drained after SIGINT or SIGTERM
1   gave up: a background loop kept failing, the compute thread hung, NATS refused us or could not be reached
2   a setting, a credential or a permission is wrong: starting again will not help
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from shared import compute_environment, logs, settings, telemetry
from shared.bus import Bus
from shared.errors import KvrelayError, Misconfigured, Unauthorized, Unavailable
from shared.settings import CommonSettings, WorkerSettings

if TYPE_CHECKING:
    from shared.actor import Actor

CONNECT_LIMIT_S = 15.0
CONNECT_RETRY_S = 0.2
LAST_WORDS_S = 3.0

log = logs.get()


def new_instance(name: str) -> str:
    """A name for one process of actor `name`: `prefill-1a2b3c`."""
    return f"{name}-{secrets.token_hex(3)}"


def run_actor(actor_class: type[Actor], configuration: CommonSettings | None = None) -> NoReturn:
    """Runs one actor until it is told to stop, then exits the process.

    `configuration` None: it is read as `settings.load` says.
    """
    code = 1
    try:
        chosen = configuration if configuration is not None else settings.load(actor_class.Settings)
        instance = chosen.instance or new_instance(actor_class.name)
        chosen = chosen.model_copy(update={"instance": instance})
        logs.setup(chosen.log_level, chosen.log_format, actor=actor_class.name, instance=instance)
        telemetry.setup(actor_class.name, instance, chosen.otlp_endpoint, chosen.trace_sample_ratio)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(serve(actor_class, chosen))
    except KvrelayError as error:
        print(f"{actor_class.name}: {error}", file=sys.stderr)
        code = 2 if isinstance(error, (Misconfigured, Unauthorized)) else 1
    except Exception as fault:
        log.error("the actor failed", exc_info=fault)
    if not telemetry.shutdown():
        log.warning("the trace collector did not take the last spans")
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread that cannot be stopped (an exporter at a dead collector, a kernel) must not keep the process
    os._exit(code)


def run_worker(kind: type[WorkerSettings], find_actor: Callable[[], type[Actor]]) -> NoReturn:
    """`run_actor` for one that computes. `find_actor` imports it, and torch with it, after the environment is set."""
    try:
        chosen = settings.load(kind)
    except KvrelayError as error:
        print(f"{kind.section}: {error}", file=sys.stderr)
        sys.exit(2)
    compute_environment.prepare(chosen.threads or compute_environment.usable_cores())
    run_actor(find_actor(), chosen)


def give_up(event: str, **fields: Any) -> NoReturn:
    """Logs `event` as an error and ends the process with code 1, whatever its other threads do.

    Nothing is drained and nothing given back: a thread that hangs may still write to memory as long as the process
    lives. What it holds ends with it, when it is heard to have ended or its leases run out.
    """

    def last_words() -> None:
        log.error(event, **fields)
        sys.stderr.flush()
        telemetry.shutdown()

    # a reader of our log that hangs, too, must not keep us
    speaker = threading.Thread(target=last_words, name="last-words", daemon=True)
    speaker.start()
    speaker.join(LAST_WORDS_S)
    os._exit(1)


async def serve(actor_class: type[Actor], chosen: CommonSettings) -> int:
    """One actor from connection to drain; the exit code. Raises what `Actor.start` raises."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    bus = await connect(chosen, actor_class.name)
    try:
        actor = actor_class(bus, chosen)
        starting = loop.create_task(actor.start())
        await _first(starting, stop.wait(), bus.connection.closed.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        elif starting.exception() is None:
            log.info("started")
            gc.collect()
            gc.freeze()  # what has been made until here lives on: looking through it all again would hold up tokens
            await _first(stop.wait(), actor.failed.wait(), bus.connection.closed.wait())
        unstarted = starting.exception() if not starting.cancelled() else None
        failure = unstarted or actor.failure or bus.connection.failure
        log.info("stopping", failure=str(failure) if failure is not None else None)
        await _drain(actor)
        if unstarted is not None:
            raise unstarted
        return 1 if failure is not None else 0
    finally:
        await bus.close()


async def _drain(actor: Actor) -> None:
    try:
        await actor.drain()
    except Exception as fault:
        log.error("stopping did not go well", exc_info=fault)


async def connect(chosen: CommonSettings, role: str) -> Bus:
    """The bus of one role; waits up to `CONNECT_LIMIT_S` for a server that is just starting."""
    access = settings.connection(chosen, role)
    deadline = asyncio.get_running_loop().time() + CONNECT_LIMIT_S
    while True:
        try:
            return await Bus.connect(
                access.url, user=access.user, password=access.password, name=role, namespace=chosen.namespace
            )
        except Unavailable:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(CONNECT_RETRY_S)


async def _first(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Returns when the first is over; the events among the others are waited for no more."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()
