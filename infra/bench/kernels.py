"""`python -m infra.bench.kernels`: the CPU kernels beside plain torch and beside the machine's read bandwidth.

Decode attention reads random pages of a pool larger than the caches, a different layer each call, as a decode step
does. The peer is what one would write in torch: index the pages, then scaled_dot_product_attention in bf16; it gets
the better of one thread and all threads, because its barriers suffer on a busy machine.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from infra.bench import report
from kernels.attention import Batch
from kernels.cpu import build
from kernels.dispatch import select
from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype

BLOCK = 16
FORMATS = ("bf16", "int8", "int8_channel", "int4", "k8v4", "fp8_e4m3")


@dataclass(frozen=True)
class Shape:
    """Heads and lengths of one decode case; `layers` keeps the pool larger than the last-level cache."""

    kv_heads: int
    group: int
    head_dim: int
    batch: int
    context: int
    layers: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}, {self.kv_heads} KV heads x {self.head_dim}, group {self.group}"


SHAPES = (
    Shape(3, 3, 64, 8, 4096, 30),
    Shape(3, 3, 64, 1, 32768, 30),
    Shape(3, 3, 64, 32, 512, 30),
    Shape(8, 4, 128, 8, 4096, 4),
    Shape(8, 4, 128, 1, 32768, 4),
    Shape(8, 4, 128, 32, 512, 8),
)


def memory(rows: int, width: int) -> Tensor:
    """Touched uint8 [rows, width] in huge pages where the kernel grants them, as the pool's memory is."""
    area = mmap.mmap(-1, rows * width)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(area, dtype=torch.uint8).view(rows, width)
    return found.fill_(0)


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads can sum."""
    words = np.ones(2**26, dtype=np.int64)
    parts = np.array_split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        return words.nbytes / report.best_seconds(lambda: list(pool.map(np.sum, parts)), budget_s=1.0)


def torch_seconds(run: Callable[[], object], threads: int, budget_s: float = 0.5) -> float:
    """Best of one thread and `threads`."""
    found = []
    for number in {1, threads}:
        torch.set_num_threads(number)
        found.append(report.best_seconds(run, budget_s=budget_s))
    return min(found)


def decode_batch(shape: Shape) -> Batch:
    """Random pages, a few tokens in each tail."""
    pages = shape.context // BLOCK
    tables = torch.randperm(shape.batch * pages).int().view(shape.batch, pages)
    whole = torch.full((shape.batch,), pages, dtype=torch.int32)
    slots = torch.arange(shape.batch, dtype=torch.int32)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32)
    return Batch(tables, whole, slots, torch.full_like(whole, 5), starts, pages, 1)


def torch_decode(shape: Shape, threads: int) -> float:
    """Seconds a layer of gather + SDPA in bf16 over [page, block, kv_heads, head_dim]."""
    pages = shape.batch * shape.context // BLOCK
    cache = torch.zeros(shape.layers, 2, pages, BLOCK, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16)
    table = decode_batch(shape).tables.long()
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, 1, shape.head_dim, dtype=torch.bfloat16)
    turn = count()

    def run() -> None:
        layer = cache[next(turn) % shape.layers]
        k, v = (side[table].flatten(1, 2).transpose(1, 2) for side in layer)
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return torch_seconds(run, threads)


def native_decode(shape: Shape, layout: PageLayout) -> float:
    """Seconds a layer of the native kernel."""
    ops = select("cpu")
    pages = memory(shape.batch * shape.context // BLOCK, layout.page_bytes)
    tails = torch.zeros(shape.batch, layout.tail_bytes, dtype=torch.uint8)
    batch = decode_batch(shape)
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, shape.head_dim, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    turn = count()
    return report.best_seconds(
        lambda: ops.attend(q, pages, tails, layout, next(turn) % shape.layers, batch, scale=0.1, out=out), budget_s=1.0
    )


def decode_rows(names: list[str], shapes: tuple[Shape, ...], threads: int, bandwidth: float) -> list[report.Row]:
    """One row per shape and format."""
    rows: list[report.Row] = []
    for shape in shapes:
        peer = torch_decode(shape, threads)
        tokens = shape.batch * shape.context
        for name in names:
            layout = page_layout(*parse_kv_cache_dtype(name), BLOCK, shape.layers, shape.kv_heads, shape.head_dim)
            seconds = native_decode(shape, layout)
            speed = tokens / BLOCK * layout.layer_bytes / seconds
            rows.append(
                {
                    "decode attention": str(shape),
                    "format": name,
                    "us/layer": seconds * 1e6,
                    "Mtok/s": tokens / seconds / 1e6,
                    "GB/s": speed / 1e9,
                    "of read bandwidth": f"{speed / bandwidth:.0%}",
                    "x torch gather+SDPA": peer / seconds,
                }
            )
    return rows


def prompt_row(name: str, kv_heads: int, group: int, head_dim: int, threads: int) -> report.Row:
    """A prompt chunk (512 new tokens at the end of 4,096) and sealing of 512 tokens."""
    ops = select("cpu")
    chunk, context = 512, 4096
    q = torch.randn(chunk, kv_heads * group, head_dim).bfloat16()
    x = torch.randn(context, kv_heads, head_dim).bfloat16()
    wide = x.transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)
    mask = torch.ones(chunk, context, dtype=torch.bool).tril(context - chunk)

    def peer() -> Tensor:
        by_head = q.transpose(0, 1).unsqueeze(0)
        return torch.nn.functional.scaled_dot_product_attention(by_head, wide, wide, attn_mask=mask)

    layout = page_layout(*parse_kv_cache_dtype(name), BLOCK, 1, kv_heads, head_dim)
    pages, ids = memory(context // BLOCK, layout.page_bytes), torch.randperm(context // BLOCK).int()
    tails = torch.zeros(1, layout.tail_bytes, dtype=torch.uint8)
    zero = torch.zeros(1, dtype=torch.int32)
    starts = torch.tensor([0, chunk], dtype=torch.int32)
    batch = Batch(ids.view(1, -1), zero + len(ids), zero, zero, starts, len(ids), chunk)
    few = ids[: chunk // BLOCK].clone()
    ops.seal(pages, layout, 0, x, x, ids)
    attend_s = report.best_seconds(lambda: ops.attend(q, pages, tails, layout, 0, batch, scale=0.1))
    seal_s = report.best_seconds(lambda: ops.seal(pages, layout, 0, x[:chunk], x[:chunk], few), budget_s=0.2)
    work = 4 * head_dim * kv_heads * group * (chunk * (context - chunk) + chunk * chunk / 2)
    return {
        "prompt chunk": f"{chunk} of {context}, {kv_heads} KV heads x {head_dim}, group {group}",
        "format": name,
        "ms/layer": attend_s * 1e3,
        "GFLOP/s": work / attend_s / 1e9,
        "x torch SDPA with mask": torch_seconds(peer, threads) / attend_s,
        "seal Mtok/s": chunk / seal_s / 1e6,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m infra.bench.kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="the first decode shape only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated; default %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    build.set_threads(options.threads)
    names = options.formats.split(",")
    bandwidth = read_bandwidth(options.threads)
    notes = {"threads": options.threads, "read_GB/s": round(bandwidth / 1e9, 1), "isa": build.isa()}
    rows = decode_rows(names, SHAPES[:1] if options.quick else SHAPES, options.threads, bandwidth)
    report.show("decode attention", rows, as_json=options.json, notes=notes)
    if not options.quick:
        prompts = [prompt_row(n, *heads, options.threads) for heads in ((3, 3, 64), (8, 4, 128)) for n in names]
        report.show("prompt attention and seal", prompts, as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
