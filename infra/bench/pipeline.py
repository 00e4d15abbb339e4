"""What the pipeline adds around the model: control plane, cached prefixes, pace beside a long prompt, idle cost.

    python -m infra.bench.pipeline [--json] [--repeat N]

Starts `kvrelay up` and talks to it over NATS as any client does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from infra.bench import peer_servers, report
from infra.bench.report import Row
from shared.bus import Bus
from shared.messages import Generate, Generated, Sampling
from shared.settings import CommonSettings, connection

_VOCABULARY = 40_000


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids, so that nothing is cached."""
    source = random.Random(seed)
    return [source.randrange(100, _VOCABULARY) for _ in range(tokens)]


async def run(bus: Bus, token_ids: list[int], max_tokens: int) -> tuple[Generated, list[float]]:
    """The last event of one greedy request, and when each event with tokens arrived."""
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    request = Generate(token_ids=token_ids, max_tokens=max_tokens, stream=True, sampling=sampling)
    arrivals: list[float] = []
    last: Generated | None = None
    async for event in bus.stream("gateway.generate", request, Generated):
        if event.token_ids:
            arrivals.append(time.perf_counter())
        last = event
    assert last is not None and last.usage is not None and last.timings is not None
    return last, arrivals


async def control_plane(bus: Bus, repeat: int) -> Row:
    """Time to first token minus compute, one request at a time."""
    costs = []
    for number in range(repeat):
        timings = (await run(bus, prompt(64, number), 2))[0].timings
        assert timings is not None
        costs.append((timings.ttft_s - timings.compute_s) * 1000)
    return row("control plane, 1 request", "ms", costs)


async def cached_prefix(bus: Bus, repeat: int) -> Row:
    """TTFT of a request whose 1,000-token prefix is cached over TTFT of the request that computed it."""
    ratios = []
    for number in range(repeat):
        prefix = prompt(1000, 1000 + number)
        ttft = []
        for tail in ([11, 12, 13], [21, 22, 23]):
            last, _ = await run(bus, [*prefix, *tail], 2)
            assert last.timings is not None and last.usage is not None
            ttft.append(last.timings.ttft_s)
            cached = last.usage.cached_tokens
        assert cached >= 992, f"only {cached} tokens of the prefix were cached"
        ratios.append(ttft[1] / ttft[0])
    return row("TTFT with cached prefix / without", "ratio", ratios)


async def pace_beside_prefill(bus: Bus, repeat: int) -> list[Row]:
    """Gaps between tokens of one stream, alone and while a prompt of 4,000 tokens is computed."""
    alone, beside = [], []
    for number in range(repeat):
        _, arrivals = await run(bus, prompt(32, 2000 + number), 96)
        alone += gaps(arrivals)
        running = asyncio.create_task(run(bus, prompt(32, 3000 + number), 256))
        began = time.perf_counter()
        await run(bus, prompt(4000, 4000 + number), 1)
        ended = time.perf_counter()
        _, arrivals = await running
        beside += gaps([moment for moment in arrivals if began < moment < ended])
    return [row("token gap alone", "ms", alone), row("token gap beside a 4,000-token prompt", "ms", beside)]


def gaps(arrivals: list[float]) -> list[float]:
    return [(later - earlier) * 1000 for earlier, later in itertools.pairwise(arrivals)]


def row(what: str, unit: str, values: list[float]) -> Row:
    ordered = sorted(values)
    return {
        "what": what,
        "unit": unit,
        "median": round(statistics.median(ordered), 3),
        "p90": round(ordered[int(len(ordered) * 0.9)] if len(ordered) > 1 else ordered[0], 3),
        "max": round(ordered[-1], 3),
        "n": len(ordered),
    }


def idle(root: int, seconds: float) -> Row:
    """CPU of the process `root` and all below it, in percent of one core."""
    before, began = cpu_seconds(root), time.monotonic()
    time.sleep(seconds)
    used = (cpu_seconds(root) - before) / (time.monotonic() - began) * 100
    return row("idle CPU, whole pipeline", "% of a core", [used])


def cpu_seconds(root: int) -> float:
    parents: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    family = {root}
    while grown := {pid for pid, (parent, _) in parents.items() if parent in family} - family:
        family |= grown
    return sum(parents[pid][1] for pid in family if pid in parents) / os.sysconf("SC_CLK_TCK")


async def measure(state: Path, repeat: int) -> list[Row]:
    access = connection(CommonSettings(state_dir=state), "client")
    bus = await Bus.connect(access.url, user=access.user, password=access.password, name="bench")
    try:
        await run(bus, prompt(64, 0), 8)
        rows = [await control_plane(bus, 5 * repeat), await cached_prefix(bus, repeat)]
        return rows + await pace_beside_prefill(bus, repeat)
    finally:
        await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    choice = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        with peer_servers.kvrelay(work, "auto", max_model_len=8192, max_num_seqs=8) as server:
            rows = asyncio.run(measure(work / "kvrelay-auto", choice.repeat))
            rows.append(idle(server.pid, seconds=10))
    report.show("pipeline", rows, as_json=choice.json)


if __name__ == "__main__":
    main()
