"""Runs sequences through a Transformer over a small private pool, as the workers do: for benches and tests."""

from __future__ import annotations

import torch

from kernels.attention import Batch
from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype
from shared.models.config import ModelConfig
from shared.models.kv_step import KVStep
from shared.models.transformer import Transformer
from shared.pool.layout import TAIL_FORMATS


def layout_of(config: ModelConfig, dtype: str, kv_cache_dtype: str = "auto", block_size: int = 16) -> PageLayout:
    """Pages for this model computing in `dtype` (torch's name), by any name of `kv_cache_dtype`."""
    tail = TAIL_FORMATS[dtype]
    k, v = parse_kv_cache_dtype(kv_cache_dtype, compute=tail)
    return page_layout(k, v, block_size, config.layers, config.kv_heads, config.head_dim, tail_format=tail)


def ints(values: list[int]) -> torch.Tensor:
    """int32, as tables and lengths are."""
    return torch.tensor(values, dtype=torch.int32)


class PagedRun:
    """Up to `sequences` sequences of up to `length` tokens; sequence i owns tail i and a run of pages."""

    def __init__(self, model: Transformer, layout: PageLayout, sequences: int, length: int) -> None:
        self.model, self.layout = model, layout
        self.per_sequence = -(-length // layout.block_size)
        self.pages = torch.zeros(sequences * self.per_sequence, layout.page_bytes, dtype=torch.uint8)
        self.tails = torch.zeros(sequences, layout.tail_bytes, dtype=torch.uint8)
        self.lengths = [0] * sequences
        self.scales: torch.Tensor | None = None
        """fp32 [layers, 2], for formats whose scale outlives a page"""

    def _table(self, sequence: int) -> torch.Tensor:
        first = sequence * self.per_sequence
        return torch.arange(first, first + self.per_sequence, dtype=torch.int32)

    def prefill(self, sequence: int, tokens: list[int], logits_rows: list[int] | None = None) -> torch.Tensor:
        """Computes one chunk, which starts at a page boundary; logits of the last row unless other rows are named."""
        size, start = self.layout.block_size, self.lengths[sequence]
        assert start % size == 0
        end = start + len(tokens)
        sealed = end // size - start // size
        table = self._table(sequence)
        rest = len(tokens) - sealed * size
        batch = Batch(
            tables=table[None], page_counts=ints([end // size]), tail_slots=ints([sequence]),
            tail_lengths=ints([rest]), query_starts=ints([0, len(tokens)]),
            max_pages=end // size, max_query=len(tokens),
        )  # fmt: skip
        kv = KVStep(
            self.pages, self.tails, self.layout, batch, ints([sequence] * rest), ints(list(range(rest))),
            seal_blocks=table[start // size : end // size], scales=self.scales,
        )  # fmt: skip
        self.lengths[sequence] = end
        rows = [len(tokens) - 1] if logits_rows is None else logits_rows
        return self.model.forward(torch.tensor(tokens), torch.arange(start, end), kv, rows).cpu()

    def decode(self, sequences: list[int], tokens: list[int]) -> torch.Tensor:
        """One step of the given sequences; logits [len(sequences), vocab]."""
        size = self.layout.block_size
        starts = [self.lengths[s] for s in sequences]
        batch = Batch(
            tables=torch.stack([self._table(s) for s in sequences]), page_counts=ints([n // size for n in starts]),
            tail_slots=ints(sequences), tail_lengths=ints([n % size + 1 for n in starts]),
            query_starts=ints(list(range(len(sequences) + 1))), max_pages=max(n // size for n in starts), max_query=1,
        )  # fmt: skip
        positions = ints([n % size for n in starts])
        kv = KVStep(self.pages, self.tails, self.layout, batch, ints(sequences), positions, scales=self.scales)
        logits = self.model.forward(torch.tensor(tokens), torch.tensor(starts), kv, list(range(len(sequences)))).cpu()
        full = [s for s in sequences if self.lengths[s] % size == size - 1]
        if full:
            blocks = [s * self.per_sequence + self.lengths[s] // size for s in full]
            indices = ints(full), ints(blocks)
            self.model.ops.seal_tails(self.pages, self.tails, self.layout, *indices, scales=self.scales)
        for s in sequences:
            self.lengths[s] += 1
        return logits
