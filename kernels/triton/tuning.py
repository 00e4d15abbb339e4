"""Shapes of attention tiles, from one table a GPU: `tuning/<name of the GPU>.json`, else `tuning/default.json`.

A table has the sections `decode` (one query a sequence) and `chunk`, each of `[tokens, warps, stages]`, and `together`
(decode over shared pages) of `[most rows, tokens, warps, stages]`, by `<K format>/<V format>/<head_dim>`,
`<K format>/*/<head_dim>` or `*/*/<head_dim>`; with a star, head_dim is rounded up to a power of two. Another number at
the end is `registers` of `TileShape`. An empty entry of `together`: no tile fits, sequences read for themselves.
`python -m infra.bench.gpu_check --tune` writes the table of the GPU it runs on.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kernels.layout import LayerLayout, PageLayout

FOLDER = Path(__file__).parent / "tuning"
DEFAULT = "default"


@dataclass(frozen=True)
class TileShape:
    """Query rows and keys of one tile, and how the compiler should spread it."""

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None
    """Most a thread may have; None lets the assembler choose, which spills a few to fit one block more."""


@cache
def table_name(device: torch.device) -> str:
    """The table for `device`: that of its GPU's name if there is one."""
    if device.type != "cuda":
        return DEFAULT
    name = file_stem(torch.cuda.get_device_name(device))
    return name if (FOLDER / f"{name}.json").exists() else DEFAULT


def file_stem(gpu: str) -> str:
    """`NVIDIA H200` as `nvidia_h200`."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@cache
def _table(name: str) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def tile_key(layout: PageLayout, place: LayerLayout, group: int) -> tuple[str, str, int, int]:
    """What the tile of a layer is looked up by. fp32 products need the registers of fp32, whatever the pages hold."""
    k_format, v_format = (place.k_format, place.v_format) if layout.tail_format != "fp32" else ("fp32", "fp32")
    return k_format, v_format, layout.head_dim, group


@cache
def tile_shape(
    k_format: str, v_format: str, head_dim: int, group: int, max_query: int, table: str = DEFAULT
) -> TileShape:
    """Tensor cores want at least 16 rows; all query heads of a KV head share a tile."""
    least = 16 if max_query == 1 else 64
    rows = max(least, 1 << (group - 1).bit_length())
    entry = _entry("decode" if max_query == 1 else "chunk", k_format, v_format, head_dim, table)
    return TileShape(rows, *entry)


@cache
def together_shape(
    k_format: str, v_format: str, head_dim: int, group: int, members: int, table: str = DEFAULT
) -> TileShape | None:
    """For decode of up to `members` sequences over pages they share; None if they should not."""
    entry = _entry("together", k_format, v_format, head_dim, table)
    if not entry:
        return None
    most, *rest = entry
    return TileShape(16 if group * members <= 16 else most, *rest)


def _entry(section: str, k_format: str, v_format: str, head_dim: int, table: str) -> list[int]:
    padded = max(64, 1 << (head_dim - 1).bit_length())
    keys = (f"{k_format}/{v_format}/{head_dim}", f"{k_format}/*/{padded}", f"*/*/{padded}")
    entries = (_table(name).get(section, {}).get(key) for name in (table, DEFAULT) for key in keys)
    return next(entry for entry in entries if entry is not None)
