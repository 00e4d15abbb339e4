"""What the pipeline costs when nobody asks for anything, and that the weights are there once."""

from __future__ import annotations

import asyncio
import time

from tests.e2e.pipeline import Pipeline, at_rest, collect, comes_true
from tests.support.processes import cpu_seconds, family, mappings

MEASURED_S = 6.0
"""Six heartbeats and as much housekeeping of every actor."""


async def test_idle_costs_under_a_twentieth_of_a_core(bf16: Pipeline) -> None:
    async with bf16.nats() as client:
        await collect(client, {"prompt": "Warm up", "max_tokens": 8})
    pids = family(bf16.process.pid)
    assert len(pids) >= 7, "up, nats-server and five actors"
    await asyncio.to_thread(comes_true, lambda: at_rest(bf16), 10)
    before, began = cpu_seconds(pids), time.monotonic()
    await asyncio.sleep(MEASURED_S)
    assert (cpu_seconds(pids) - before) / (time.monotonic() - began) < 0.05


async def test_weights_are_shared(bf16: Pipeline) -> None:
    async with bf16.nats() as client:
        await collect(client, {"prompt": "Touch every weight once", "max_tokens": 8})
    pids = bf16.pids()
    private = {name: private_bytes(pids[name], "weights") for name in ("prefill", "decode")}
    mapped = {name: mapped_bytes(pids[name], "weights") + mapped_bytes(pids[name], "packed") for name in private}
    assert all(size > 50 << 20 for size in mapped.values()), mapped
    assert all(size == 0 for size in private.values()), private
    anonymous = {name: private_bytes(pids[name], "") for name in private}
    assert all(size < 350 << 20 for size in anonymous.values()), f"a private copy of the weights? {anonymous}"


def private_bytes(pid: int, name: str) -> int:
    """Dirty private memory of mappings whose path contains `name`; of anonymous memory if `name` is empty."""
    return sum(
        sizes["Private_Dirty"] for path, sizes in mappings(pid) if (name in path if name else not path.startswith("/"))
    )


def mapped_bytes(pid: int, name: str) -> int:
    return sum(sizes["Rss"] for path, sizes in mappings(pid) if name in path)
