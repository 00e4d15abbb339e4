"""What a KV format costs in accuracy: KL, top-1 agreement and perplexity against bf16 KV, on real prose and code.

    python -m infra.bench.kv_quality [--tokens N] [--context N] [--dtype float32] [--formats A,B+skip] [--json]

The text is the language reference that ships inside Python (`pydoc_data`) and source files of the standard library.
Every token attends to sealed pages only, its own page included: each figure is an upper bound of what decoding sees.
Scales of `*_per_tensor` are calibrated on text behind the measured part. With `--dtype float32` the arithmetic around
the pages adds no noise of its own; the row `fp32` is then the distance of bf16 KV from exact KV, the floor of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import time
from collections.abc import Iterator
from itertools import chain

import torch

from infra.bench.report import Row, show
from kernels.attention import Batch
from kernels.dispatch import select
from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype, parse_skip_layers
from kernels.scales import PoolScales
from shared.models.calibration import calibrate
from shared.models.files import ModelFiles, prepare
from shared.models.kv_step import KVStep
from shared.models.tokenizer import Tokenizer
from shared.models.transformer import Transformer
from shared.pool.layout import TAIL_FORMATS

FORMATS = (
    "fp32", "fp16", "int8_channel", "int8", "fp8_e4m3", "fp8_e5m2", "int8_per_tensor", "fp8_per_tensor",
    "k16v4", "k16v4+skip", "k8v4", "k8v4+skip", "int4", "int4+skip",
)  # fmt: skip
SKIPPED = ("first:2", "last:2")
"""What `+skip` keeps in the compute dtype."""
CALIBRATION_TOKENS = 4096


def corpus() -> str:
    """Real English prose and Python code in about equal parts, the same on every machine with this Python version."""
    import argparse as code_a
    import asyncio.base_events as code_b
    import typing as code_c
    from pydoc_data import topics

    prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    code = "\n\n".join(inspect.getsource(module) for module in (code_a, code_b, code_c))
    step = 8192
    pairs = ((prose[start : start + step], code[start : start + step]) for start in range(0, len(code), step))
    return "".join(chain.from_iterable(pairs))


def layout_of(name: str, files: ModelFiles, block_size: int) -> PageLayout:
    """`name` is a KV format, or a pair `K/V`, with `+skip` behind it for `SKIPPED`."""
    config, tail = files.config, TAIL_FORMATS[files.dtype]
    base, _, skip = name.partition("+")
    k, _, v = base.partition("/")
    k_format, v_format = parse_kv_cache_dtype(k, v=v or None, compute=tail)
    skipped = parse_skip_layers(SKIPPED, config.layers) if skip else ()
    shape = (block_size, config.layers, config.kv_heads, config.head_dim)
    return page_layout(k_format, v_format, *shape, skip_layers=skipped, tail_format=tail)


def served_bytes_per_token(name: str, files: ModelFiles, block_size: int) -> float:
    """Of a pool of the default compute dtype, whatever this run computes in."""
    return layout_of(name, dataclasses.replace(files, dtype="bfloat16"), block_size).bytes_per_token()


def log_probabilities(
    model: Transformer, tokens: torch.Tensor, layout: PageLayout, scales: torch.Tensor | None
) -> torch.Tensor:
    """float32 [T, vocab]: one forward over `tokens` (T a multiple of the block size), all of it sealed."""
    count, blocks = tokens.numel(), tokens.numel() // layout.block_size
    table = torch.arange(blocks, dtype=torch.int32)
    batch = Batch(
        tables=table[None],
        page_counts=torch.tensor([blocks], dtype=torch.int32),
        tail_slots=torch.zeros(1, dtype=torch.int32),
        tail_lengths=torch.zeros(1, dtype=torch.int32),
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        max_pages=blocks,
        max_query=count,
    )
    pages = torch.empty(blocks, layout.page_bytes, dtype=torch.uint8)
    tails = torch.empty(1, layout.tail_bytes, dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int32)
    step = KVStep(pages, tails, layout, batch, none, none, seal_blocks=table, scales=scales)
    logits = model.forward(tokens, torch.arange(count), step, list(range(count)))
    return torch.log_softmax(logits, dim=-1)


def windows(ids: list[int], context: int, tokens: int) -> Iterator[torch.Tensor]:
    """Consecutive pieces of `context` tokens, as many as make `tokens`."""
    for start in range(0, tokens - tokens % context, context):
        yield torch.tensor(ids[start : start + context])


def scales_of(model: Transformer, files: ModelFiles, layout: PageLayout, ids: list[int]) -> torch.Tensor | None:
    """float32 [layers, 2] learned from `ids`, or None for formats that keep their scales in the page."""
    if not layout.needs_scales:
        return None
    return PoolScales(calibrate(model, files.identity, [ids], layout), layout).tensor


def measure(
    model: Transformer, files: ModelFiles, ids: list[int], names: list[str], choice: argparse.Namespace
) -> list[Row]:
    """One row per format, bf16 first. Means over all predicted tokens; `kl` is KL(bf16 KV ‖ this format) in nats."""
    held_out = ids[choice.tokens : choice.tokens + CALIBRATION_TOKENS]
    layouts = {name: layout_of(name, files, choice.block_size) for name in ("bf16", *names)}
    scales = {name: scales_of(model, files, layout, held_out) for name, layout in layouts.items()}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in layouts}  # KL, agreement, negative log likelihood
    predicted, began = 0, time.monotonic()
    for tokens in windows(ids, choice.context, choice.tokens):
        base = log_probabilities(model, tokens, layouts["bf16"], None)[:-1]
        probabilities = base.exp()
        predicted += base.shape[0]
        for name, layout in layouts.items():
            own = base if name == "bf16" else log_probabilities(model, tokens, layout, scales[name])[:-1]
            kl = (probabilities * (base - own)).sum(-1).double().sum()
            agreement = (own.argmax(-1) == base.argmax(-1)).sum()
            surprise = -own.gather(1, tokens[1:, None]).double().sum()
            sums[name] += torch.stack([kl, agreement.double(), surprise])
        print(f"{predicted} tokens, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    reference = float((sums["bf16"][2] / predicted).exp())
    rows: list[Row] = []
    for name, total in sums.items():
        kl_mean, agreement_mean, surprise_mean = (total / predicted).tolist()
        perplexity = float(torch.tensor(surprise_mean, dtype=torch.float64).exp())
        rows.append({
            "format": name,
            "bytes_per_token": round(served_bytes_per_token(name, files, choice.block_size)),
            "kl": f"{kl_mean:.6f}",
            "top1": f"{agreement_mean:.2%}",
            "perplexity": f"{perplexity:.4f}",
            "change": f"{perplexity / reference - 1:+.3%}",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=sorted(TAIL_FORMATS), help="compute dtype")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each window, a multiple of the block size")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    choice = parser.parse_args()
    files = prepare(choice.model, choice.dtype)
    model = Transformer(files, choice.dtype, select("auto"), choice.threads)
    ids = Tokenizer.load(files).encode(corpus(), add_special=False)
    rows = measure(model, files, ids, [name for name in choice.formats.split(",") if name], choice)
    notes = {"model": choice.model, "dtype": choice.dtype, "tokens": choice.tokens, "context": choice.context}
    show("accuracy of KV formats against bf16 KV", rows, as_json=choice.json, notes=notes)


if __name__ == "__main__":
    main()
