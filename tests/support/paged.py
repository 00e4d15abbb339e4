"""Small pools of poisoned memory with known keys and values, for judging attention kernels by the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import Batch
from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype
from kernels.reference.attend import attend
from kernels.reference.seal import seal
from kernels.reference.tails import append_tails

POISON = 0xFF
"""Every float format reads it as NaN."""
NEVER = 0x7FFFFFF
"""Table entry that no kernel may follow."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = torch.tensor([[0.11, 0.05], [0.13, 0.07]])
"""Per-tensor scales [layers, 2], K and V unlike."""
LAYER = 1


@dataclass
class Paged:
    """Two layers, of which the second holds data: sequences of `lengths` keys over scattered pages."""

    layout: PageLayout
    pages: Tensor
    tails: Tensor
    scales: Tensor
    batch: Batch

    def to(self, device: torch.device) -> Paged:
        pages, tails, scales = self.pages.to(device), self.tails.to(device), self.scales.to(device)
        return Paged(self.layout, pages, tails, scales, self.batch.to(device))

    def exact(self, q: Tensor, **options: object) -> Tensor:
        """The float64 reference, on the CPU."""
        here = self.to(torch.device("cpu"))
        return attend(
            q.cpu().double(), here.pages, here.tails, here.layout, LAYER, here.batch, scales=here.scales,
            compute=torch.float64, **options,
        )  # type: ignore[arg-type]  # fmt: skip


def i32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def keys_and_values(layout: PageLayout, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random K (with one strong, biased channel, as models have) and V [tokens, kv_heads, head_dim]."""
    shape = (tokens, layout.kv_heads, layout.head_dim)
    dtype = DTYPES[layout.tail_format]
    k = torch.randn(shape, generator=generator)
    k[:, :, 3] += 8
    return k.to(dtype), torch.randn(shape, generator=generator).to(dtype)


def build(
    kv_cache_dtype: str,
    lengths: Sequence[int],
    *,
    queries: Sequence[int] | None = None,
    head_dim: int = 64,
    block_size: int = 16,
    kv_heads: int = 2,
    compute: str = "fp32",
    seed: int = 0,
) -> Paged:
    """Sequences of `lengths` keys each, all pages that can be full sealed, the rest in tails; one query each, or as
    given. Bytes that belong to nobody are poison."""
    generator = torch.Generator().manual_seed(seed)
    k_format, v_format = parse_kv_cache_dtype(kv_cache_dtype, compute=compute)
    layout = page_layout(k_format, v_format, block_size, 2, kv_heads, head_dim, tail_format=compute)
    counts = [length // block_size for length in lengths]
    total = sum(counts) + 2
    pages = torch.full((total, layout.page_bytes), POISON, dtype=torch.uint8)
    tails = torch.full((len(lengths) + 1, layout.tail_bytes), POISON, dtype=torch.uint8)
    free = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    slots = torch.randperm(len(lengths) + 1, generator=generator)[: len(lengths)].tolist()
    widest = max(max(counts), 1)
    tables = torch.full((len(lengths), widest + 1), NEVER, dtype=torch.int32)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        ids = i32([free.pop() for _ in range(count)])
        k, v = keys_and_values(layout, length, generator)
        whole, rest = count * block_size, length - count * block_size
        if count:
            seal(pages, layout, LAYER, k[:whole], v[:whole], ids, SCALES)
            tables[b, :count] = ids
        if rest:
            where = torch.full((rest,), slots[b], dtype=torch.int32)
            append_tails(tails, layout, LAYER, k[whole:], v[whole:], where, torch.arange(rest, dtype=torch.int32))
    asked = list(queries) if queries is not None else [1] * len(lengths)
    batch = Batch(
        tables=tables,
        page_counts=i32(counts),
        tail_slots=i32([slot if length % block_size else NEVER for slot, length in zip(slots, lengths, strict=True)]),
        tail_lengths=i32([length % block_size for length in lengths]),
        query_starts=i32([0, *torch.tensor(asked).cumsum(0).tolist()]),
        max_pages=widest,
        max_query=max(asked),
    )
    return Paged(layout, pages, tails, SCALES, batch)


def query(paged: Paged, group: int, seed: int = 1) -> Tensor:
    """Random q [T, kv_heads * group, head_dim] in the compute dtype, on the device of the pages."""
    shape = (int(paged.batch.query_starts[-1]), paged.layout.kv_heads * group, paged.layout.head_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return q.to(DTYPES[paged.layout.tail_format]).to(paged.pages.device)


def tolerance(compute: str) -> float:
    """Largest difference from float64 for values of magnitude about 4: rounding of weights, codes and the result."""
    return {"fp32": 2e-5, "fp16": 1e-2, "bf16": 4e-2}[compute]
