"""What a KV format costs in accuracy: KL, top-1 agreement and perplexity against bf16 KV, on real prose and code.

    python -m infra.bench.kv_quality [--tokens N] [--context N] [--dtype float32] [--formats A,B+skip] [--json FILE]

The text is the language reference that ships inside Python (`pydoc_data`) and source files of the standard library.
Every token attends to sealed pages only, its own page included: each figure is an upper bound of what decoding sees.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from infra.bench.report import machine, table
from kernels.attention import Batch
from kernels.dispatch import select
from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype
from shared.models.config import ModelConfig
from shared.models.files import prepare
from shared.models.kv_step import KVStep
from shared.models.tokenizer import Tokenizer
from shared.models.transformer import Transformer

FORMATS = (
    "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel", "k16v4", "k16v4+skip", "k8v4", "int4", "int4+skip",
)  # fmt: skip
SKIPPED = 2
"""`+skip` keeps this many first and last layers in 16 bits."""
TAIL_FORMAT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Quality:
    """Means over all predicted tokens. `kl` is KL(bf16 KV ‖ this format) in nats."""

    format: str
    bytes_per_token: float
    kl: float
    top1: float
    perplexity: float
    perplexity_change: float


def corpus() -> str:
    """Real English prose and Python code in about equal parts, the same on every machine with this Python version."""
    import argparse as code_a
    import asyncio.base_events as code_b
    import typing as code_c
    from pydoc_data import topics

    prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    code = "\n\n".join(inspect.getsource(module) for module in (code_a, code_b, code_c))
    pieces = []
    step = 8192
    for start in range(0, len(code), step):
        pieces += [prose[start : start + step], code[start : start + step]]
    return "".join(pieces)


def layout_of(name: str, config: ModelConfig, block_size: int, dtype: str) -> PageLayout:
    base, _, skip = name.partition("+")
    k_format, v_format = parse_kv_cache_dtype(base)
    first_and_last = (*range(SKIPPED), *range(config.layers - SKIPPED, config.layers))
    return page_layout(
        k_format, v_format, block_size, config.layers, config.kv_heads, config.head_dim,
        skip_layers=first_and_last if skip else (), tail_format=TAIL_FORMAT[dtype],
    )  # fmt: skip


def log_probabilities(model: Transformer, tokens: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """float32 [T, vocab]: one forward over `tokens` (T a multiple of the block size), all of it sealed."""
    blocks = tokens.numel() // layout.block_size
    counts = torch.tensor([blocks], dtype=torch.int32)
    table_of_one = torch.arange(blocks, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    batch = Batch(
        tables=table_of_one[None],
        page_counts=counts,
        tail_slots=torch.zeros(1, dtype=torch.int32),
        tail_lengths=torch.zeros(1, dtype=torch.int32),
        query_starts=torch.tensor([0, tokens.numel()], dtype=torch.int32),
        max_pages=blocks,
        max_query=tokens.numel(),
    )
    step = KVStep(
        pages=torch.empty(blocks, layout.page_bytes, dtype=torch.uint8),
        tails=torch.empty(1, layout.tail_bytes, dtype=torch.uint8),
        layout=layout,
        batch=batch,
        append_slots=none,
        append_positions=none,
        seal_blocks=table_of_one,
    )
    logits = model.forward(tokens, torch.arange(tokens.numel()), step, list(range(tokens.numel())))
    return torch.log_softmax(logits, dim=-1)


def windows(ids: list[int], context: int, tokens: int) -> Iterator[torch.Tensor]:
    for start in range(0, min(tokens, len(ids) - context), context):
        yield torch.tensor(ids[start : start + context])


def measure(model: Transformer, ids: list[int], names: list[str], choice: argparse.Namespace) -> list[Quality]:
    layouts = {name: layout_of(name, model.config, choice.block_size, choice.dtype) for name in ["bf16", *names]}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in layouts}  # KL, agreement, negative log likelihood
    predicted = 0
    for tokens in windows(ids, choice.context, choice.tokens):
        base = log_probabilities(model, tokens, layouts["bf16"])[:-1]
        probabilities = base.exp()
        predicted += base.shape[0]
        for name, layout in layouts.items():
            own = base if name == "bf16" else log_probabilities(model, tokens, layout)[:-1]
            kl = (probabilities * (base - own)).sum(-1).sum()
            agreement = (own.argmax(-1) == base.argmax(-1)).sum()
            surprise = -own.gather(1, tokens[1:, None]).sum()
            sums[name] += torch.stack([kl.double(), agreement.double(), surprise.double()])
    reference = float((sums["bf16"][2] / predicted).exp())
    results = []
    for name, total in sums.items():
        kl_mean, agreement_mean, surprise_mean = (total / predicted).tolist()
        perplexity = float(torch.tensor(surprise_mean).exp())
        bytes_per_token = layouts[name].page_bytes / choice.block_size
        change = perplexity / reference - 1
        results.append(Quality(name, bytes_per_token, kl_mean, agreement_mean, perplexity, change))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=sorted(TAIL_FORMAT), help="compute dtype")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each window, a multiple of the block size")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--json", type=Path)
    choice = parser.parse_args()
    files = prepare(choice.model, choice.dtype)
    model = Transformer(files, choice.dtype, select("auto"), torch.get_num_threads())
    ids = Tokenizer.load(files).encode(corpus(), add_special=False)
    results = measure(model, ids, [name for name in choice.formats.split(",") if name], choice)
    print(machine())
    rows = [
        [one.format, f"{one.bytes_per_token:,.0f}", f"{one.kl:.5f}", f"{one.top1:.2%}", f"{one.perplexity:.4f}",
         f"{one.perplexity_change:+.3%}"]
        for one in results
    ]  # fmt: skip
    print(table(["format", "bytes/token", "KL", "top-1", "perplexity", "change"], rows))
    if choice.json:
        payload = {
            "machine": machine(),
            "settings": vars(choice) | {"json": None},
            "results": [asdict(one) for one in results],
        }
        choice.json.write_text(json.dumps(payload, indent=2) + "\n")


if __name__ == "__main__":
    main()
