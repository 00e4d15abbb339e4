"""`python -m infra.bench.kernels`: the CPU kernels beside plain torch and beside the machine's read bandwidth.

Decode attention reads random pages of a pool larger than the caches, a different layer each call, as a decode step
does. The peer is the fastest way we found to write it in torch: index_select of the pages, then
scaled_dot_product_attention in bf16 with the query heads of a KV head as rows (`enable_gqa` is several times slower).
Both are timed twice: by wall clock on all threads, where the peer gets the better of one thread and all, because its
barriers suffer on a busy machine; and by CPU time on one thread, which a busy machine changes least.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
    """Touched uint8 [rows, width] in huge pages where Linux grants them, as the pool's memory is."""
    area = mmap.mmap(-1, rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


def cpu_seconds(run: Callable[[], object], threads: int, budget_s: float = 0.5) -> float:
    """CPU time of the best of repeated runs on one thread; afterwards `threads` again."""
    torch.set_num_threads(1)
    build.set_threads(1)
    run()
    best, end = float("inf"), time.thread_time() + budget_s
    while time.thread_time() < end:
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    torch.set_num_threads(threads)
    build.set_threads(threads)
    return best


def torch_seconds(run: Callable[[], object], threads: int, budget_s: float = 0.5) -> float:
    """Best of one thread and `threads`, which are set afterwards."""
    found = []
    for number in sorted({1, threads}):
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


def torch_decode(shape: Shape) -> Callable[[], None]:
    """One layer of gather + SDPA in bf16 over [page, block, kv_heads, head_dim], another layer each call."""
    pages = shape.batch * shape.context // BLOCK
    cache = memory(shape.layers * 2 * pages, BLOCK * shape.kv_heads * shape.head_dim * 2).view(torch.bfloat16)
    cache = cache.view(shape.layers, 2, pages, BLOCK, shape.kv_heads, shape.head_dim)
    table = decode_batch(shape).tables.flatten()
    q = torch.randn(shape.batch, shape.kv_heads, shape.group, shape.head_dim, dtype=torch.bfloat16)
    turn = count()

    def run() -> None:
        sides = (side.index_select(0, table) for side in cache[next(turn) % shape.layers])
        tokens = (side.view(shape.batch, shape.context, shape.kv_heads, shape.head_dim) for side in sides)
        k, v = (side.transpose(1, 2) for side in tokens)
        torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return run


def native_decode(shape: Shape, layout: PageLayout, *, shared: bool = False) -> Callable[[], object]:
    """One layer of the native kernel; `shared`: all sequences have the pages of the first, only tails are their own."""
    ops = select("cpu")
    pages = memory(shape.batch * shape.context // BLOCK, layout.page_bytes)
    tails = torch.zeros(shape.batch, layout.tail_bytes, dtype=torch.uint8)
    batch = decode_batch(shape)
    if shared:
        batch = replace(batch, tables=batch.tables[:1].repeat(shape.batch, 1))
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, shape.head_dim, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    turn = count()
    return lambda: ops.attend(q, pages, tails, layout, next(turn) % shape.layers, batch, scale=0.1, out=out)


def layout_of(name: str, shape: Shape) -> PageLayout:
    """Pages of one format."""
    return page_layout(*parse_kv_cache_dtype(name), BLOCK, shape.layers, shape.kv_heads, shape.head_dim)


def decode_rows(names: list[str], shapes: tuple[Shape, ...], threads: int, bandwidth: float) -> list[report.Row]:
    """One row per shape and format."""
    rows: list[report.Row] = []
    for shape in shapes:
        run: Callable[[], object] = torch_decode(shape)
        peer, peer_cpu = torch_seconds(run, threads), cpu_seconds(run, threads)
        tokens = shape.batch * shape.context
        for name in names:
            layout = layout_of(name, shape)
            run = native_decode(shape, layout)
            seconds, cpu = report.best_seconds(run, budget_s=1.0), cpu_seconds(run, threads)
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
                    "x by CPU time, 1 thread": peer_cpu / cpu,
                }
            )
    return rows


def shared_row(name: str, shape: Shape, threads: int) -> report.Row:
    """Sequences with pages of their own against sequences that share all of them."""
    layout = layout_of(name, shape)
    runs = [native_decode(shape, layout, shared=shared) for shared in (False, True)]
    own, shared = (report.best_seconds(run, budget_s=1.0) for run in runs)
    own_cpu, shared_cpu = (cpu_seconds(run, threads) for run in runs)
    tokens = shape.batch * shape.context
    return {
        "shared prefix": str(shape),
        "format": name,
        "Mtok/s own pages": tokens / own / 1e6,
        "Mtok/s shared pages": tokens / shared / 1e6,
        "x": own / shared,
        "x by CPU time, 1 thread": own_cpu / shared_cpu,
    }


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
    shared = [shared_row(name, SHAPES[0], options.threads) for name in names]
    report.show("shared prefix", shared, as_json=options.json, notes=notes)
    if not options.quick:
        prompts = [prompt_row(n, *heads, options.threads) for heads in ((3, 3, 64), (8, 4, 128)) for n in names]
        report.show("prompt attention and seal", prompts, as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
