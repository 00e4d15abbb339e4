"""Compiling the kernels for GPUs that are not there, and reading what they need: registers, spills, shared memory."""

# mypy: ignore-errors

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.layout import PageLayout
from kernels.shared_prefix import MEMBERS
from kernels.triton import argmax_rows, attend, gather, merge, rms_norm, rope, seal, silu_mul, tails, tuning
from kernels.triton._formats import RAW_TYPES, TORCH_TYPES, constants, dot_type, side

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Largest shared memory of one block in bytes, by compute capability (CUDA programming guide)."""
_POINTERS = {"out": "compute", "q": "compute", "k": "compute", "v": "compute", "part": "fp32", "lse": "fp32",
             "page_lse": "fp32", "scales": "fp32", "merged_lse": "fp32", "pages": "u8", "tails": "u8",
             "x": "compute", "weight": "compute", "residual": "fp32", "cos": "fp32", "sin": "fp32",
             "gate_up": "compute", "logits": "fp32"}  # fmt: skip
_INDICES = {"tables", "counts", "tail_slots", "tail_lengths", "query_starts", "members", "first_pages", "block_ids",
            "slots", "positions"}  # fmt: skip
_FLOATS = ("scale", "softcap", "eps")
_ALIGNED = {"layer_offset", "tail_offset", "q_row", "q_head", "out_row", "out_head", "part_row", "part_split",
            "k_page", "k_token", "k_head", "v_page", "v_token", "v_head"}  # fmt: skip
"""Integers that are multiples of 16 for every layout, which the launcher finds out and compiles for."""


@dataclass(frozen=True)
class Resources:
    """Per thread: registers, stack and local memory (spills) in bytes. Per block: static and dynamic shared memory."""

    registers: int
    stack: int
    local: int
    shared: int


def attention(
    layout: PageLayout,
    group: int,
    capability: int,
    *,
    layer: int = 0,
    max_query: int = 1,
    splits: int = 8,
    shape: tuning.TileShape | None = None,
    extras: Collection[str] = (),
    members: int = MEMBERS,
) -> Resources:
    """The kernel for one layer's formats and `group` query heads a KV head: decode, or chunks if `max_query` > 1.

    `extras`: any of WINDOW, SOFTCAP, PAGE_LSE, and one of TOGETHER (up to `members` sequences over shared pages) and
    REST (what is behind them).
    """
    place = layout.layer(layer)
    compute = RAW_TYPES[layout.tail_format]
    wanted = tuning.tile_key(layout, place, group)
    if shape is None and "TOGETHER" in extras:
        shape = tuning.together_shape(*wanted, members)
    shape = shape or tuning.tile_shape(*wanted, max_query)
    fixed = {
        **constants(layout, place),
        "TAIL_BYTES": layout.tail_bytes,
        "TAIL_V": place.tail_v - place.tail_k,
        "TAIL_RAW": compute,
        "GROUP": group,
        "BLOCK_M": shape.rows,
        "BLOCK_N": shape.tokens,
        "SPLITS": splits,
        "K_DOT": dot_type(side(place.k_format, keys=True), TORCH_TYPES[layout.tail_format], False),
        "V_DOT": dot_type(side(place.v_format, keys=False), TORCH_TYPES[layout.tail_format], False),
        "TAIL_DOT": compute,
        "CAUSAL": max_query > 1,
        **{name: name in extras for name in ("WINDOW", "SOFTCAP", "PAGE_LSE", "TOGETHER", "REST")},
    }
    spread = shape.warps, shape.stages, shape.registers
    return resources(attend.attend_kernel, layout.tail_format, fixed, capability, *spread)


def pages(layout: PageLayout, capability: int, *, layer: int = 0) -> dict[str, Resources]:
    """The kernels that write and read pages and tails, for one layer's formats."""
    place, compute = layout.layer(layer), layout.tail_format
    fixed = constants(layout, place)
    tail = {
        "TAIL_BYTES": layout.tail_bytes,
        "TAIL_V": place.tail_v - place.tail_k,
        "TAIL_RAW": RAW_TYPES[compute],
        "HEAD_DIM": layout.head_dim,
        "DIM_PAD": _pad(layout.head_dim),
        "BLOCK_SIZE": layout.block_size,
    }
    return {
        "seal": resources(seal.seal_kernel, compute, fixed, capability, 4, 3),
        "gather": resources(gather.gather_kernel, compute, fixed, capability, 4, 3),
        "append": resources(tails.append_kernel, compute, tail, capability, 1, 3),
    }


def rows(head_dim: int, width: int, compute: str, capability: int) -> dict[str, Resources]:
    """The kernels that know nothing of pages."""
    parts = {"PARTS": 8, "PARTS_PAD": 8, "HEAD_DIM": head_dim, "DIM_PAD": _pad(head_dim)}
    half = {"HALF": head_dim // 2, "HALF_PAD": _pad(head_dim // 2)}
    wide = {"WIDTH": width, "WIDTH_PAD": _pad(width)}
    return {
        "merge of splits": resources(
            merge.merge_kernel, compute, parts | {"BASE2": True, "KEEP_LSE": False}, capability, 4, 3
        ),
        "merge": resources(merge.merge_kernel, compute, parts | {"BASE2": False, "KEEP_LSE": True}, capability, 4, 3),
        "rope": resources(rope.rope_kernel, compute, half, capability, 1, 3),
        "rms_norm": resources(rms_norm.rms_norm_kernel, compute, wide | {"RESIDUAL": True}, capability, 4, 3),
        "rms_norm, no residual": resources(
            rms_norm.rms_norm_kernel, compute, wide | {"RESIDUAL": False}, capability, 4, 3
        ),
        "silu_mul": resources(silu_mul.silu_mul_kernel, compute, {"BLOCK": silu_mul.BLOCK}, capability, 4, 3),
        "argmax_rows": resources(argmax_rows.argmax_kernel, compute, {"BLOCK": argmax_rows.BLOCK}, capability, 8, 3),
    }


def _pad(value: int) -> int:
    return 1 << (value - 1).bit_length()


def resources(
    kernel: Any,
    compute: str,
    fixed: dict[str, Any],
    capability: int,
    warps: int,
    stages: int,
    registers: int | None = None,
) -> Resources:
    """Compiles `kernel` for sm_<capability> with the constants `fixed` and reads the binary's own figures."""
    names = [name for name in kernel.arg_names if name not in fixed]
    signature = {name: _type_of(name, compute) for name in names} | dict.fromkeys(fixed, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    whole = [name for name in names if ordered[name].startswith("*") or name in _ALIGNED]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in whole}
    source = ASTSource(kernel, ordered, constexprs=fixed, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers,
               "enable_fp_fusion": kernel is attend.attend_kernel}  # fmt: skip
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(usage["REG"], usage["STACK"], usage["LOCAL"], max(usage["SHARED"], compiled.metadata.shared))


def _type_of(name: str, compute: str) -> str:
    kind = _POINTERS.get(name)
    if kind is not None:
        return f"*{compute if kind == 'compute' else kind}"
    if name in _INDICES:
        return "*i32"
    return "fp32" if name in _FLOATS else "i32"


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", done.stdout)}
    if found.keys() != {"REG", "STACK", "SHARED", "LOCAL"}:
        raise RuntimeError(f"cuobjdump said nothing about resources: {done.stdout!r} {done.stderr!r}")
    return found
