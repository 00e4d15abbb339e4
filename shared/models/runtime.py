"""A loaded model with its kernels, and the pool memory it works on: what both engines share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import dispatch
from kernels.dispatch import Ops
from kernels.layout import PageLayout
from kernels.scale_file import ScaleFile
from kernels.scales import PoolScales
from shared.errors import Misconfigured
from shared.handles import Layout
from shared.models.files import ModelFiles
from shared.models.transformer import Transformer
from shared.pool import Pool
from shared.pool.layout import geometry


def load(files: ModelFiles, dtype: str, kernels: str, threads: int) -> Transformer:
    """The model on `threads` threads with the ops of backend `kernels`. Misconfigured if they cannot run here."""
    try:
        ops: Ops = dispatch.select(kernels)
    except (ValueError, dispatch.BackendUnavailable) as error:
        raise Misconfigured(str(error)) from error
    return Transformer(files, dtype, ops, threads)


def pool_scales(scales: ScaleFile, layout: Layout) -> PoolScales:
    """The scales of a pool as kernels take them."""
    return PoolScales(scales, geometry(layout))


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages and tails as tensors over the mapped pool. `pool` None is private memory, for warming up."""

    pages: torch.Tensor
    """uint8 [blocks, page_bytes]"""
    tails: torch.Tensor
    """uint8 [tails, tail_bytes]"""
    layout: PageLayout
    pool: Pool | None = None

    @classmethod
    def of(cls, pool: Pool, layout: Layout) -> Memory:
        """The tensors share the pool's memory and keep it mapped."""
        return cls(torch.from_numpy(pool.pages), torch.from_numpy(pool.tails), geometry(layout), pool)

    @classmethod
    def private(cls, layout: Layout, blocks: int, tails: int) -> Memory:
        """Zeroed memory of this process."""
        pages = torch.zeros(blocks, layout.page_bytes, dtype=torch.uint8)
        return cls(pages, torch.zeros(tails, layout.tail_bytes, dtype=torch.uint8), geometry(layout))
