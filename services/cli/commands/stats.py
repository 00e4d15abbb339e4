"""`kvrelay stats`: pools and actors of the running pipeline."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from services.cli import console, state_dir
from services.cli.application import application
from services.cli.connection import JsonOption, NamespaceOption, NatsUrlOption, StateDirOption, Where, connected, run
from services.cli.geometry import too_small

if TYPE_CHECKING:
    from shared.bus import Bus

app = application()
LISTEN_S = 2.5
"""Actors send a heartbeat each second: whoever is silent this long is not there."""
PING_SILENCE_S = 0.25
ASK_LIMIT_S = 10.0
RETRY_S = 0.1


@app.command()
def stats(
    as_json: JsonOption = False,
    state: StateDirOption = None,
    nats_url: NatsUrlOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show the pools (pages free, filling, active, cached, quarantined) and the actors."""
    where = Where(state, nats_url, namespace)
    settings = where.settings()
    expected = state_dir.running(settings.state_dir).get("actors", {}) if settings.nats_url is None else {}
    found = run(_collect(where, expected))
    if as_json:
        console.print_json(found)
    else:
        _show(found)


async def _collect(where: Where, expected: dict[str, int]) -> dict[str, Any]:
    """`expected` is how many of each actor there should be. Listening ends early once everybody there was heard."""
    from shared import wire
    from shared.messages import Heartbeat

    heard: dict[str, Heartbeat] = {}
    news = asyncio.Event()

    async def note(message: Any) -> None:
        beat = wire.decode(message.data, Heartbeat)
        heard[beat.instance] = beat
        news.set()

    async with connected("client", where) as bus:
        await bus.subscribe("event.actor.heartbeat", note)
        pools = asyncio.create_task(_pools(bus))
        with suppress(TimeoutError):  # somebody is missing, which the answer shows
            async with asyncio.timeout(LISTEN_S):
                present = await _present(bus)
                while not (present <= heard.keys() and _complete(heard.values(), expected)):
                    news.clear()
                    await news.wait()
        return {"pools": await pools, "actors": _actors(list(heard.values()), expected)}


def _complete(heard: Iterable[Any], expected: dict[str, int]) -> bool:
    counts = Counter(beat.actor for beat in heard)
    return all(counts[actor] >= wanted for actor, wanted in expected.items())


async def _present(bus: Bus) -> set[str]:
    """The instances that answer a ping now; their heartbeats are worth waiting for."""
    from shared.errors import Unavailable
    from shared.messages import Empty, Message

    class Pong(Message):
        id: str
        metadata: dict[str, str]

    found = set()
    with suppress(Unavailable):  # so ends every round of answers: nobody knows how many there are
        async with aclosing(bus.stream("$SRV.PING", Empty(), Pong, idle_timeout_s=PING_SILENCE_S)) as answers:
            async for pong in answers:
                if pong.metadata.get("namespace") == bus.namespace:
                    found.add(pong.id)
    return found


async def _pools(bus: Bus) -> dict[str, Any]:
    """Asks the block manager, waiting a little for one that is just being restarted."""
    from shared.errors import Unavailable
    from shared.messages import Empty, Stats

    give_up = asyncio.get_running_loop().time() + ASK_LIMIT_S
    while True:
        try:
            answer = await bus.request("block_manager.stats", Empty(), Stats, timeout_s=2.0)
        except Unavailable:
            if asyncio.get_running_loop().time() > give_up:
                raise
            await asyncio.sleep(RETRY_S)
        else:
            return {name: pool.model_dump() for name, pool in answer.pools.items()}


def _actors(heard: list[Any], expected: dict[str, int]) -> list[dict[str, Any]]:
    """One entry per actor heard, and one with health `missing` per actor that should be there and is not."""
    rows = [
        {
            "name": beat.actor,
            "instance": beat.instance,
            "pid": beat.pid,
            "health": "draining" if beat.draining else "ready" if beat.ready else "starting",
            "reason": beat.reason,
            "details": beat.details,
        }
        for beat in heard
    ]
    for actor, wanted in expected.items():
        missing = wanted - sum(row["name"] == actor for row in rows)
        absent: dict[str, Any] = {
            "name": actor,
            "instance": None,
            "pid": None,
            "health": "missing",
            "reason": "",
            "details": {},
        }
        rows += [dict(absent) for _ in range(missing)]
    return sorted(rows, key=lambda row: (row["name"], row["instance"] or ""))


def _show(found: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    pools = Table(title="pools", title_justify="left")
    pools.add_column("")
    for name in found["pools"]:
        pools.add_column(name, justify="right")
    columns = [_pool_column(pool) for pool in found["pools"].values()]
    for heading in columns[0] if columns else ():
        pools.add_row(heading, *(column[heading] for column in columns))
    actors = Table(title="actors", title_justify="left")
    for heading in ("actor", "instance", "pid", "health"):
        actors.add_column(heading, overflow="fold")
    for row in found["actors"]:
        colour = {"ready": "green", "missing": "red"}.get(row["health"], "yellow")
        health = f"[{colour}]{row['health']}[/] {escape(row['reason'])}".strip()
        actors.add_row(row["name"], row["instance"] or "-", str(row["pid"] or "-"), health)
    console.out().print(pools)
    for name, pool in found["pools"].items():
        advice = too_small(pool["block_size"], pool["table_share"], pool["scale_share"])
        if advice:
            console.out().print(f"{name}: {advice}", style="yellow", highlight=False)
    console.out().print(actors)


def _pool_column(pool: dict[str, Any]) -> dict[str, str]:
    """What the table shows of a pool, from top to bottom."""
    states = ("total", "free", "filling", "active", "cached", "quarantined", "pinned")
    return {
        **{name: str(pool[name]) for name in states},
        "memory": f"{console.size(pool['bytes_used'])} of {console.size(pool['bytes_total'])}",
        "K / V format": f"{pool['k_format']} / {pool['v_format']}",
        "bytes per token": f"{pool['bytes_per_token']:,.0f}",
        "of it scales": f"{pool['scale_share']:.1%}",
        "block table": f"{pool['table_share']:.2%}",
        "tails free": f"{pool['tails_free']} of {pool['tails_total']}",
        "leases": str(pool["leases"]),
        "prompt tokens": str(pool["prompt_tokens"]),
        "found cached": f"{pool['hit_tokens'] / max(1, pool['prompt_tokens']):.0%}",
        "evictions": str(pool["evictions"]),
    }
