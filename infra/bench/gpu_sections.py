"""What `gpu_check` measures: copies, decode attention, shared pages, sealing. Times are medians by the GPU's clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from infra.bench.report import Row
from kernels.attention import Batch
from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype
from kernels.shared_prefix import share
from kernels.triton.attend import attend
from kernels.triton.seal import seal
from kernels.triton.tuning import TileShape

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 8, 4, 128, 16
"""The attention of an 8 B Llama: 8 KV heads of 128, 4 query heads each."""
FORMATS = ("bf16", "fp8_e4m3", "int8", "int8_channel", "int4")
BATCHES = (1, 8, 64)
CONTEXTS = (4096, 32_768, 131_072)
TARGETS = {"bf16": 0.70, "int8": 0.55}
"""Share of the copy bandwidth that decode attention must reach at 32 K and more, batch 8 and more."""
FAMILY, FAMILY_CONTEXT, FAMILY_OWN = 8, 32_768, 1024
"""Sequences that share all of their context but the last keys."""
MEMORY_SHARE = 0.6


class Case(NamedTuple):
    """Pages of random bytes that are valid codes and scales, more of them than the device's cache holds."""

    layout: PageLayout
    pages: torch.Tensor
    tails: torch.Tensor
    batch: Batch
    q: torch.Tensor

    @property
    def bytes(self) -> int:
        """What one attention call has to read."""
        return len(self.batch) * self.batch.max_pages * self.layout.layer_bytes


def seconds(run: Callable[[], object], *, budget_s: float = 0.15, least: int = 5) -> float:
    """Median duration of `run` on the device, after warming up."""
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken: list[float] = []
    while len(taken) < least or (sum(taken) < budget_s and len(taken) < 200):
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken)


def copy_bandwidth() -> float:
    """Bytes a second that a large copy on the device reads and writes together."""
    size = min(2 << 30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def layout_of(kv_cache_dtype: str, head_dim: int = HEAD_DIM) -> PageLayout:
    """One layer in bf16 compute."""
    k_format, v_format = parse_kv_cache_dtype(kv_cache_dtype)
    return page_layout(k_format, v_format, BLOCK, 1, KV_HEADS, head_dim)


def decode_case(layout: PageLayout, sequences: int, context: int) -> Case:
    """`sequences` of `context` keys over scattered pages, with half-full tails."""
    pages_each = context // BLOCK
    total = sequences * pages_each
    generator = torch.Generator(device="cuda").manual_seed(0)
    sample = 512
    pages = torch.empty((total, layout.page_bytes), dtype=torch.uint8, device="cuda")
    kind = (sample * BLOCK, KV_HEADS, layout.head_dim)
    k, v = (torch.randn(kind, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for first in range(0, total, sample):
        ids = torch.arange(first, min(first + sample, total), dtype=torch.int32, device="cuda")
        seal(pages, layout, 0, k[: len(ids) * BLOCK], v[: len(ids) * BLOCK], ids)
    tails = torch.randn(sequences * layout.tail_bytes // 2, generator=generator, device="cuda", dtype=torch.bfloat16)
    i32 = {"dtype": torch.int32, "device": "cuda"}
    batch = Batch(
        tables=torch.randperm(total, generator=generator, device="cuda").to(torch.int32).view(sequences, pages_each),
        page_counts=torch.full((sequences,), pages_each, **i32),
        tail_slots=torch.arange(sequences, **i32),
        tail_lengths=torch.full((sequences,), BLOCK // 2, **i32),
        query_starts=torch.arange(sequences + 1, **i32),
        max_pages=pages_each,
        max_query=1,
    )
    q = torch.randn(
        (sequences, KV_HEADS * GROUP, layout.head_dim), generator=generator, device="cuda", dtype=torch.bfloat16
    )
    return Case(layout, pages, tails.view(torch.uint8).view(sequences, layout.tail_bytes), batch, q)


def attention(case: Case, out: torch.Tensor | None = None, shape: TileShape | None = None) -> torch.Tensor:
    """One decode step of one layer."""
    scale = case.layout.head_dim**-0.5
    return attend(case.q, case.pages, case.tails, case.layout, 0, case.batch, scale=scale, out=out, shape=shape)


def attention_seconds(case: Case, shape: TileShape | None = None) -> float:
    """Of one decode step of one layer."""
    out = torch.empty_like(case.q)
    return seconds(lambda: attention(case, out, shape))


def decode_attention(bandwidth: float, quick: bool) -> Iterator[Row]:
    """Decode attention as a share of `bandwidth`, with the verdict where there is a target."""
    for name, sequences, context in product(FORMATS, BATCHES, CONTEXTS):
        layout = layout_of(name)
        if quick and (sequences, context) != (8, 32_768):
            continue
        if sequences * context // BLOCK * layout.page_bytes > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            continue
        case = decode_case(layout, sequences, context)
        took = attention_seconds(case)
        share = case.bytes / took / bandwidth
        target = TARGETS.get(name) if sequences >= 8 and context >= 32_768 else None
        verdict = "-" if target is None else "met" if share >= target else f"below {target:.0%}"
        yield {
            "format": name, "batch": sequences, "context": context, "us": took * 1e6,
            "GB/s": case.bytes / took / 1e9, "share %": 100 * share, "target": verdict,
        }  # fmt: skip
        del case
        torch.cuda.empty_cache()


def shared_prefix(bandwidth: float, quick: bool) -> Iterator[Row]:
    """Decode of a family of sequences, each reading all of its pages, against reading the common ones once.

    `share` is of the bytes that are read once. Must be faster, and the same up to rounding.
    """
    for name in FORMATS[:1] if quick else FORMATS:
        layout = layout_of(name)
        case = decode_case(layout, FAMILY, FAMILY_CONTEXT)
        common = (FAMILY_CONTEXT - FAMILY_OWN) // BLOCK
        tables, counts = case.batch.tables, case.batch.page_counts
        tables[1:, :common] = tables[0, :common]
        plan = share(tables.cpu().numpy(), counts.cpu().numpy(), layout.layer_bytes)
        assert plan is not None
        together = case._replace(batch=replace(case.batch, shared=plan.to(tables.device)))
        apart_s, together_s = attention_seconds(case), attention_seconds(together)
        difference = (attention(case) - attention(together)).abs().max().item()
        read = case.bytes - (FAMILY - 1) * common * layout.layer_bytes
        met = together_s < apart_s and difference < 0.01
        yield {
            "format": name, "batch": FAMILY, "context": FAMILY_CONTEXT, "shared": common * BLOCK,
            "us apart": apart_s * 1e6, "us together": together_s * 1e6, "times as fast": apart_s / together_s,
            "share %": 100 * read / together_s / bandwidth, "difference": difference,
            "target": "met" if met else "below it",
        }  # fmt: skip
        del case, together
        torch.cuda.empty_cache()


def sealing(bandwidth: float) -> Iterator[Row]:
    """Sealing of 4,096 tokens of one layer; `share` counts what is read and written."""
    tokens = 4096
    kind = (tokens, KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(kind, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ids = torch.randperm(tokens // BLOCK, device="cuda").to(torch.int32)
    for name in FORMATS:
        layout = layout_of(name)
        pages = torch.empty((tokens // BLOCK, layout.page_bytes), dtype=torch.uint8, device="cuda")
        took = seconds(lambda pages=pages, layout=layout: seal(pages, layout, 0, k, v, ids))  # type: ignore[misc]
        moved = 2 * k.nbytes + len(ids) * layout.layer_bytes
        yield {
            "format": name, "us": took * 1e6, "Mtokens/s": tokens / took / 1e6,
            "share %": 100 * moved / took / bandwidth,
        }  # fmt: skip


def tune() -> dict[str, dict[str, list[int]]]:
    """The fastest decode tile of each format and head_dim, as `tuning/<gpu>.json` holds it."""
    found: dict[str, list[int]] = {}
    for name, head_dim in product(FORMATS, (64, 128, 256)):
        layout = layout_of(name, head_dim)
        case = decode_case(layout, 8, 16_384)
        best, chosen = math.inf, None
        for tokens, warps, stages in product((32, 64, 128), (2, 4, 8), (1, 2, 3)):
            try:
                took = attention_seconds(case, TileShape(16, tokens, warps, stages))
            except Exception as error:  # a tile may need more than the chip has
                print(f"  {name} {head_dim} {tokens}/{warps}/{stages}: {type(error).__name__}")
                continue
            if took < best:
                best, chosen = took, [tokens, warps, stages]
        if chosen is not None:
            found[f"{layout.k_format}/{layout.v_format}/{head_dim}"] = chosen
        del case
        torch.cuda.empty_cache()
    return {"decode": found, "chunk": {}}
