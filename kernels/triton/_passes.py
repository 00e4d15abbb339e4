"""The launches one attention call takes, and into how many shares each cuts its pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import Batch
from kernels.layout import LayerLayout, PageLayout
from kernels.triton._launch import multiprocessors
from kernels.triton.tuning import TileShape, table_name, tile_key, tile_shape, together_shape

MOST_SPLITS = 64


class Pass(NamedTuple):
    """One launch of the kernel over `sequences` sequences or groups of them."""

    sequences: int
    tiles: int
    starts: Tensor
    counts: Tensor
    members: Tensor
    first_pages: Tensor
    shape: TileShape
    splits: int
    together: bool = False
    rest: bool = False


def passes_of(
    batch: Batch,
    layout: PageLayout,
    place: LayerLayout,
    group: int,
    device: torch.device,
    splits: int,
    shape: TileShape | None,
) -> list[Pass]:
    """All pages and tails in one launch; or first those that are shared, for each group, and then what is left."""
    size, shared = len(batch), batch.shared
    wanted = tile_key(layout, place, group)
    wide = None
    if shared is not None:
        wide = shape or together_shape(*wanted, shared.max_members, table_name(device))
    keys = batch.max_pages * layout.block_size
    counts = batch.page_counts if batch.kv_head_counts is None else batch.kv_head_counts
    most = MOST_SPLITS if wide is None else MOST_SPLITS // 2

    def cut(tiles: int, sequences: int, tokens: int) -> int:
        return splits or min(_splits(tiles * sequences * layout.kv_heads, keys, tokens, device), most)

    own = shape or tile_shape(*wanted, batch.max_query, table_name(device))
    tiles = -(-batch.max_query // (own.rows // group))
    unused = batch.query_starts
    whole = Pass(size, tiles, batch.query_starts, counts, unused, unused, own, cut(tiles, size, own.tokens))
    if shared is None or wide is None:
        return [whole]
    tiles = -(-shared.max_members // (wide.rows // group))
    # split as if there were few groups: where there are many, each of them is short of work only at its end
    few = -(-size // shared.max_members)
    together = Pass(
        len(shared.page_counts), tiles, shared.member_starts, shared.page_counts, shared.members, unused, wide,
        cut(tiles, few, wide.tokens), together=True,
    )  # fmt: skip
    return [together, whole._replace(first_pages=shared.first_pages, rest=True)]


def _splits(programs: int, keys: int, tile: int, device: torch.device) -> int:
    """Shares per sequence: about two programs a multiprocessor, no share below four tiles, a power of two."""
    wanted = min(2 * multiprocessors(device) // max(programs, 1), keys // (4 * tile), MOST_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
