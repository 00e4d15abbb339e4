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
from shared.pool import Pool, device_of
from shared.pool.layout import geometry


def load(files: ModelFiles, dtype: str, kernels: str, threads: int, device: str = "cpu") -> Transformer:
    """The model on `device` (`cpu` on `threads` threads, or `cuda:<N>`) with the ops of backend `kernels`.

    Call it on the thread that computes: Triton launches on that thread's current GPU. Raises Misconfigured if they
    cannot run here.
    """
    if device != "cpu":
        _enter(torch.device(device))
    try:
        ops: Ops = dispatch.select(kernels, device.partition(":")[0])
    except (ValueError, dispatch.BackendUnavailable) as error:
        raise Misconfigured(str(error)) from error
    try:
        return Transformer(files, dtype, ops, threads, device)
    except torch.OutOfMemoryError as error:
        size = files.weights.stat().st_size / 2**30
        raise Misconfigured(f"the weights need {size:.1f} GiB, which {device} does not have free") from error


def _enter(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise Misconfigured(f"torch cannot use {device}: it needs a CUDA build of torch and the NVIDIA driver")
    if (count := torch.cuda.device_count()) <= (device.index or 0):
        raise Misconfigured(f"torch cannot use {device}: it sees {count} GPUs (CUDA_VISIBLE_DEVICES)")
    torch.cuda.set_device(device)


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
        """The tensors share the pool's memory and keep it mapped.

        Raises Misconfigured if its GPU has another number here than where it was created: what the name says is where
        the model is, too.
        """
        device, found = device_of(pool.name), getattr(pool.pages, "device_index", None)
        if found is not None and device != f"cuda:{found}":
            raise Misconfigured(
                f"pool {pool.name} is on the GPU that has number {found} in this process: give the block manager and "
                "all workers the same CUDA_VISIBLE_DEVICES"
            )
        pages, tails = (torch.as_tensor(memory, device=device) for memory in (pool.pages, pool.tails))
        return cls(pages, tails, geometry(layout), pool)

    @classmethod
    def private(cls, layout: Layout, blocks: int, tails: int, device: torch.device | str = "cpu") -> Memory:
        """Zeroed memory of this process."""
        pages = torch.zeros(blocks, layout.page_bytes, dtype=torch.uint8, device=device)
        slots = torch.zeros(tails, layout.tail_bytes, dtype=torch.uint8, device=device)
        return cls(pages, slots, geometry(layout))

    def fence(self) -> None:
        """Returns when everything written so far is in the pages: they may be published then."""
        if self.pages.is_cuda:
            torch.cuda.current_stream(self.pages.device).synchronize()
