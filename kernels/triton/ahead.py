"""Compiling the kernels for GPUs that are not there, and reading what they need: registers, spills, shared memory."""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype
from kernels.triton import attend, merge, seal, tuning
from kernels.triton._formats import RAW_TYPES, constants, dot_type, side

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Largest shared memory of one block in bytes, by compute capability (CUDA programming guide)."""
_TYPE_NAMES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_POINTERS = {"out": "compute", "q": "compute", "k": "compute", "v": "compute", "part": "fp32", "lse": "fp32",
             "page_lse": "fp32", "scales": "fp32", "merged_lse": "fp32", "pages": "u8", "tails": "u8"}  # fmt: skip
_FLOATS = ("scale", "softcap")
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
) -> Resources:
    """The kernel for one layer's formats and `group` query heads a KV head: decode, or chunks if `max_query` > 1."""
    place = layout.layer(layer)
    compute = RAW_TYPES[layout.tail_format]
    torch_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[layout.tail_format]
    shape = shape or tuning.tile_shape(place.k_format, place.v_format, layout.head_dim, group, max_query)
    fixed = {
        **constants(layout, place),
        "TAIL_BYTES": layout.tail_bytes,
        "TAIL_V": place.tail_v - place.tail_k,
        "TAIL_RAW": compute,
        "GROUP": group,
        "BLOCK_M": shape.rows,
        "BLOCK_N": shape.tokens,
        "SPLITS": splits,
        "K_DOT": dot_type(side(place.k_format, keys=True), torch_type, False),
        "V_DOT": dot_type(side(place.v_format, keys=False), torch_type, False),
        "TAIL_DOT": compute,
        "CAUSAL": max_query > 1,
        "WINDOW": False,
        "SOFTCAP": False,
        "PAGE_LSE": False,
    }
    return resources(attend.attend_kernel, layout.tail_format, fixed, capability, shape.warps, shape.stages)


def sealing(layout: PageLayout, capability: int, *, layer: int = 0) -> Resources:
    """The seal kernel for one layer's formats."""
    return resources(seal.seal_kernel, layout.tail_format, constants(layout, layout.layer(layer)), capability, 4, 1)


def merging(head_dim: int, splits: int, compute: str, capability: int) -> Resources:
    """The kernel that merges `splits` partial results."""
    fixed = {
        "PARTS": splits,
        "PARTS_PAD": 1 << (splits - 1).bit_length(),
        "HEAD_DIM": head_dim,
        "DIM_PAD": 1 << (head_dim - 1).bit_length(),
        "BASE2": True,
        "KEEP_LSE": False,
    }
    return resources(merge.merge_kernel, compute, fixed, capability, 4, 1)


def resources(kernel: Any, compute: str, fixed: dict[str, Any], capability: int, warps: int, stages: int) -> Resources:
    """Compiles `kernel` for sm_<capability> with the constants `fixed` and reads the binary's own figures."""
    names = [name for name in kernel.arg_names if name not in fixed]
    signature = {name: _type_of(name, compute) for name in names} | dict.fromkeys(fixed, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    whole = [name for name in names if ordered[name].startswith("*") or name in _ALIGNED]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in whole}
    source = ASTSource(kernel, ordered, constexprs=fixed, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": kernel is attend.attend_kernel}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(usage["REG"], usage["STACK"], usage["LOCAL"], max(usage["SHARED"], compiled.metadata.shared))


def _type_of(name: str, compute: str) -> str:
    kind = _POINTERS.get(name)
    if kind is not None:
        return f"*{_TYPE_NAMES[compute] if kind == 'compute' else kind}"
    if name in ("tables", "counts", "tail_slots", "tail_lengths", "query_starts", "block_ids"):
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


FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel", "int4", "k16v4", "k8v4",
           "int8_per_tensor", "fp8_e4m3_per_tensor", "fp8_e5m2_per_tensor")  # fmt: skip
"""What decode serves. fp32, which is for comparing models, needs more registers than there are beyond head_dim 64."""
GROUPS = (1, 3, 4, 8, 16)
HEAD_DIMS = (64, 80, 96, 128, 256)
SAMPLE = (
    ("bf16", 128, 4, 80), ("int8", 64, 3, 90), ("int8_channel", 128, 8, 90), ("int8_channel", 256, 4, 100),
    ("int4", 96, 1, 80), ("fp8_e4m3", 80, 16, 100), ("k8v4", 64, 4, 90),
)  # fmt: skip
"""(kv_cache_dtype, head_dim, group, compute capability): every format kind, width, group and architecture once."""


def decode_case(kv_cache_dtype: str, head_dim: int, group: int, capability: int) -> tuple[Resources, list[str]]:
    """What the decode kernel of one case needs, and what is wrong with that."""
    compute = kv_cache_dtype if kv_cache_dtype in _TYPE_NAMES else "bf16"
    k_format, v_format = parse_kv_cache_dtype(kv_cache_dtype, compute=compute)
    layout = page_layout(k_format, v_format, 16, 2, 2, head_dim, tail_format=compute)
    found = attention(layout, group, capability)
    wrong = []
    if found.stack or found.local:
        wrong.append(f"spills {found.stack} + {found.local} bytes a thread")
    if found.shared > SHARED_LIMIT[capability]:
        wrong.append(f"needs {found.shared} bytes of shared memory of {SHARED_LIMIT[capability]}")
    return found, wrong


def main(arguments: list[str] | None = None) -> int:
    """Compiles the decode kernels; exit code 1 if one spills or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.ahead", description=main.__doc__)
    parser.add_argument("--sample", action="store_true", help="a representative few instead of the whole matrix")
    chosen = parser.parse_args(arguments)
    cases = SAMPLE if chosen.sample else tuple(itertools.product(FORMATS, HEAD_DIMS, GROUPS, SHARED_LIMIT))
    failures = 0
    for case in cases:
        found, wrong = decode_case(*case)
        failures += bool(wrong)
        name, head_dim, group, capability = case
        print(
            f"{'BAD ' if wrong else 'ok  '} {name:20} head_dim {head_dim:3} group {group:2} sm_{capability:<3} "
            f"{found.registers:3} registers {found.shared:6} B shared {'; '.join(wrong)}",
            flush=True,
        )
    print(f"{len(cases) - failures} of {len(cases)} decode kernels fit without spills")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
