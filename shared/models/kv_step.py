"""Where one forward pass reads and writes its keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention import Batch
from kernels.dispatch import Ops
from kernels.layout import PageLayout
from shared.models.config import ModelConfig


@dataclass(slots=True)
class KVStep:
    """Pool memory, the tables of the rows' sequences, and the write plan of the new keys and values.

    The first `len(seal_blocks) * block_size` rows (prefill: whole pages of one sequence) are sealed into `seal_blocks`;
    every row behind them is appended to `append_slots[row]` at `append_positions[row]`. Both happen before attention,
    and `batch` already counts the new rows, so a result depends neither on the cuts between chunks nor on caching.
    """

    pages: torch.Tensor
    """uint8 [num_blocks, page_bytes]"""
    tails: torch.Tensor
    """uint8 [num_tails, tail_bytes]"""
    layout: PageLayout
    batch: Batch
    append_slots: torch.Tensor
    """int32 [T - sealed rows]"""
    append_positions: torch.Tensor
    """int32 [T - sealed rows], positions inside the tail"""
    seal_blocks: torch.Tensor | None = None
    """int32 [sealed pages]"""
    scales: torch.Tensor | None = None
    """fp32 [layers, 2] (K, V) where a format's scale outlives a page, or None"""
    observe: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
    """Prefill only: sees layer, k and v [T, kv_heads, head_dim] before they are stored."""

    def to(self, device: torch.device) -> KVStep:
        """This step with its plan and tables on `device`, where pages and tails are already."""
        if device.type == "cpu":
            return self
        return dataclasses.replace(
            self,
            batch=self.batch.to(device),
            append_slots=self.append_slots.to(device),
            append_positions=self.append_positions.to(device),
            seal_blocks=None if self.seal_blocks is None else self.seal_blocks.to(device),
            scales=None if self.scales is None else self.scales.to(device),
        )

    @property
    def seal_rows(self) -> int:
        return 0 if self.seal_blocks is None else self.seal_blocks.numel() * self.layout.block_size

    def write_and_attend(
        self,
        ops: Ops,
        config: ModelConfig,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores k, v [T, kv_heads, head_dim] of one layer as planned, then attends from q [T, heads, head_dim]."""
        sealed = self.seal_rows
        if self.observe is not None:
            self.observe(layer, k, v)
        if self.seal_blocks is not None and sealed:
            ops.seal(self.pages, self.layout, layer, k[:sealed], v[:sealed], self.seal_blocks, scales=self.scales)
        if sealed < k.shape[0]:
            ops.append_tails(
                self.tails, self.layout, layer, k[sealed:], v[sealed:], self.append_slots, self.append_positions
            )
        window, batch = config.window(layer), self.batch
        if window and batch.shared is not None:
            batch = dataclasses.replace(batch, shared=None)
        attended: torch.Tensor = ops.attend(
            q, self.pages, self.tails, self.layout, layer, batch,
            scale=config.head_dim**-0.5, window=window, scales=self.scales, out=out,
        )  # fmt: skip
        return attended
