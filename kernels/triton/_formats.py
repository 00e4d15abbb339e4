"""KV formats as the compile-time constants the kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl

from kernels.layout import LayerLayout, PageLayout

RAW_TYPES: dict[str, Any] = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# format name -> (code, granularity on the K side, granularity on the V side); numbers as in `_codes.py`
_KINDS = {
    "bf16": (0, 3, 3),
    "fp16": (0, 3, 3),
    "fp32": (0, 3, 3),
    "int8": (1, 0, 0),
    "int8_channel": (1, 1, 0),
    "int8_per_tensor": (1, 2, 2),
    "fp8_e4m3": (2, 0, 0),
    "fp8_e4m3_per_tensor": (2, 2, 2),
    "fp8_e5m2": (3, 0, 0),
    "fp8_e5m2_per_tensor": (3, 2, 2),
    "int4": (4, 1, 0),
}


@dataclass(frozen=True)
class Side:
    """How one side (K or V) of a layer is stored."""

    code: int
    granularity: int
    raw: Any


@cache
def side(name: str, keys: bool) -> Side:
    """Constants of format `name`. ValueError for a format that has no Triton kernels."""
    if name not in _KINDS:
        raise ValueError(f"no Triton kernels for KV format {name!r}; they know {', '.join(_KINDS)}")
    code, k_granularity, v_granularity = _KINDS[name]
    return Side(code, k_granularity if keys else v_granularity, RAW_TYPES.get(name, tl.float32))


def dot_type(side_: Side, compute: torch.dtype, interpreted: bool) -> Any:
    """Operand type of `tl.dot`: holds the codes of the format exactly. Never bf16 in the interpreter, which breaks it.

    fp16 for everything quantised: bf16 could not hold codes under a scale of their own, nor eight-bit codes cheaply.
    """
    if compute == torch.float32:
        return tl.float32
    found = side_.raw if side_.code == 0 else tl.float16
    return tl.float32 if interpreted and found == tl.bfloat16 else found


def constants(layout: PageLayout, place: LayerLayout) -> dict[str, Any]:
    """Geometry every page kernel takes; segment offsets are relative to the layer, so one binary serves all layers."""
    k, v = side(place.k_format, keys=True), side(place.v_format, keys=False)
    dim = layout.head_dim
    return {
        "PAGE_BYTES": layout.page_bytes,
        "K_SCALES": place.k_scales - place.offset,
        "V_CODES": place.v_codes - place.offset,
        "V_SCALES": place.v_scales - place.offset,
        "K_CODE": k.code,
        "K_GRAIN": k.granularity,
        "K_RAW": k.raw,
        "V_CODE": v.code,
        "V_GRAIN": v.granularity,
        "V_RAW": v.raw,
        "KV_HEADS": layout.kv_heads,
        "HEAD_DIM": dim,
        "HALF_PAD": max(32, 1 << (dim // 2 - 1).bit_length()),
        "BLOCK_SIZE": layout.block_size,
        # groups of a V token in the int4 format: each half of the channels in runs of 32 (formats/int4.py)
        "GROUPS": -(-(dim // 2) // 32),
    }
