"""`python -m infra.bench.step`: decode steps and prefill of the engine alone, without actors, queues or sampling.

Wall time says what a user gets; CPU time divided by the threads says what the same code gives on cores of its own, and
stays comparable when the machine is busy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from infra.bench import report
from infra.bench.kernels import memory
from infra.bench.paged_run import PagedRun, layout_of
from kernels.dispatch import select
from shared.models.files import prepare
from shared.models.transformer import Transformer

SHAPES = ((1, 64), (8, 64), (32, 512), (1, 4096), (8, 4096))
"""(sequences, tokens of context)"""


def timed(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median wall seconds and mean CPU seconds of one call."""
    action()
    walls = []
    cpu = time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        walls.append(time.perf_counter() - start)
    return sorted(walls)[repeats // 2], (time.process_time() - cpu) / repeats


def decode(model: Transformer, dtype: str, kv: str, sequences: int, context: int, repeats: int) -> tuple[float, float]:
    """Wall and CPU seconds of one step of `sequences`, each with `context` tokens behind it."""
    run = PagedRun(model, layout_of(model.config, dtype, kv), sequences, context + 16)
    run.pages = memory(*run.pages.shape)  # what was never written would be read from one page of zeros
    rows = list(range(sequences))

    def step() -> None:
        run.lengths = [context] * sequences
        run.decode(rows, [100 + row for row in rows])

    return timed(step, repeats)


def prefill(model: Transformer, dtype: str, kv: str, tokens: int, chunk: int) -> tuple[float, float]:
    """Wall and CPU seconds of a prompt of `tokens` random tokens, `chunk` in one pass."""
    run = PagedRun(model, layout_of(model.config, dtype, kv), 1, tokens)
    prompt = torch.randint(0, model.config.vocab_size, (tokens,)).tolist()

    def whole() -> None:
        run.lengths = [0]
        for start in range(0, tokens, chunk):
            run.prefill(0, prompt[start : start + chunk])

    return timed(whole, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto", "int8"])
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of one forward pass")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = Transformer(prepare(options.model, options.dtype), options.dtype, select(options.kernels), options.threads)
    rows: list[report.Row] = []

    def add(what: str, kv: str, tokens: int, seconds: tuple[float, float]) -> None:
        wall, cpu = seconds
        rows.append(
            {
                "what": what,
                "kv_cache_dtype": kv,
                "ms": round(wall * 1e3, 2),
                "tokens_per_s": round(tokens / wall),
                "tokens_per_s_on_free_cores": round(tokens * options.threads / cpu),
            }
        )

    for kv in options.kv_cache_dtype:
        for sequences, context in SHAPES:
            repeats = 15 if sequences * context > 8192 else 40
            add(f"decode {sequences} x {context}", kv, sequences,
                decode(model, options.dtype, kv, sequences, context, repeats))  # fmt: skip
        add(f"prefill {options.prompt}", kv, options.prompt,
            prefill(model, options.dtype, kv, options.prompt, options.chunk))  # fmt: skip
    report.show("step", rows, as_json=options.json)


if __name__ == "__main__":
    main()
