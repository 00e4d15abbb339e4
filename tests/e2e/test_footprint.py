"""What the pipeline costs when nobody asks for anything, and that the weights are there once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pipeline import Pipeline, collect, pipeline


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pipeline(tmp_path_factory.mktemp("footprint"), "--num-blocks-override", "256") as started:
        yield started


def family(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_idle_costs_under_a_twentieth_of_a_core(running: Pipeline) -> None:
    async with running.nats() as client:
        await collect(client, {"prompt": "Warm up", "max_tokens": 8})
    pids = family(running.process.pid)
    assert len(pids) >= 7, "up, nats-server and five actors"
    await asyncio.sleep(2)  # let what the request started settle; the measurement below is the test
    before, began = cpu_seconds(pids), time.monotonic()
    await asyncio.sleep(8)
    assert (cpu_seconds(pids) - before) / (time.monotonic() - began) < 0.05


async def test_weights_are_shared(running: Pipeline) -> None:
    async with running.nats() as client:
        await collect(client, {"prompt": "Touch every weight once", "max_tokens": 8})
    pids = running.pids()
    private = {name: private_bytes(pids[name], "weights") for name in ("prefill", "decode")}
    mapped = {name: mapped_bytes(pids[name], "weights") + mapped_bytes(pids[name], "packed") for name in private}
    assert all(size > 50 << 20 for size in mapped.values()), mapped
    assert all(size == 0 for size in private.values()), private
    anonymous = {name: private_bytes(pids[name], "") for name in private}
    assert all(size < 350 << 20 for size in anonymous.values()), f"a private copy of the weights? {anonymous}"


def smaps(pid: int) -> Iterator[tuple[str, dict[str, int]]]:
    """(path, sizes in bytes) of each mapping."""
    path, sizes = "", {}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if not head[0].endswith(":"):
            if sizes:
                yield path, sizes
            path, sizes = (head[5] if len(head) > 5 else ""), {}
        elif head[-1] == "kB":
            sizes[head[0][:-1]] = int(head[1]) * 1024
    yield path, sizes


def private_bytes(pid: int, name: str) -> int:
    """Dirty private memory of mappings whose path contains `name`; of anonymous memory if `name` is empty."""
    return sum(
        sizes["Private_Dirty"] for path, sizes in smaps(pid) if (name in path if name else not path.startswith("/"))
    )


def mapped_bytes(pid: int, name: str) -> int:
    return sum(sizes["Rss"] for path, sizes in smaps(pid) if name in path)
