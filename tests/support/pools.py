"""Small pools for tests: a layout without a model, real shared memory in a temporary directory."""

from __future__ import annotations

from pathlib import Path

from shared.handles import BlockTable, Layout, TailHandle, pack_u32
from shared.messages import PoolDescription
from shared.pool import shm
from shared.pool.base import Pool
from shared.pool.shm import ShmPool


def tiny_layout(page_bytes: int = 4096, tail_bytes: int = 1024) -> Layout:
    return Layout(
        k_format="bf16",
        v_format="bf16",
        tail_format="bf16",
        block_size=16,
        layers=1,
        kv_heads=1,
        head_dim=16,
        page_bytes=page_bytes,
        tail_bytes=tail_bytes,
        fingerprint="f00d",
    )


def describe(pool: ShmPool, layout: Layout) -> PoolDescription:
    return PoolDescription(
        pool=pool.name,
        kind="shm",
        path=str(pool.path),
        epoch=pool.epoch,
        blocks=pool.blocks,
        tails=pool.slots,
        layout=layout,
        max_model_len=16,
    )


def make_pool(state_dir: Path, name: str = "p", blocks: int = 8, tails: int = 2, page_bytes: int = 4096) -> ShmPool:
    return shm.create(name, state_dir, tiny_layout(page_bytes), blocks, tails)


def handles(pool: Pool, blocks: list[int], tail: int | None = None) -> tuple[BlockTable, TailHandle | None]:
    """Handles of these pages and this tail as they are now."""
    table = BlockTable(
        pool=pool.name, epoch=pool.epoch, indices=pack_u32(blocks), generations=pack_u32(pool.generations[blocks])
    )
    if tail is None:
        return table, None
    return table, TailHandle(slot=tail, generation=int(pool.generations[pool.blocks + tail]))
