"""The kernels over all formats, widths and architectures, compiled without a GPU: what needs more than a chip has?"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

from kernels.layout import page_layout, parse_kv_cache_dtype
from kernels.triton.ahead import SHARED_LIMIT, Resources, attention, pages, rows

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel", "int4", "k16v4", "k8v4",
           "int8_per_tensor", "fp8_e4m3_per_tensor", "fp8_e5m2_per_tensor")  # fmt: skip
"""What decode serves. fp32, which is for comparing models, needs more registers than there are beyond head_dim 64."""
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8, 16)
BLOCK_SIZES = (16, 32)
SAMPLE = (
    ("bf16", 128, 4, 16, 80), ("int8", 64, 3, 32, 90), ("int8_channel", 256, 8, 16, 100), ("int4", 96, 1, 16, 80),
    ("fp8_e4m3", 80, 16, 16, 100), ("k8v4", 64, 4, 16, 90),
)  # fmt: skip
"""(kv_cache_dtype, head_dim, group, block_size, compute capability): every kind of format, width and chip once."""
VARIANTS = ((7, ()), (7, ("WINDOW", "SOFTCAP")), (1, ("WINDOW",)), (1, ("SOFTCAP", "PAGE_LSE")))
"""(max_query, extras) beyond plain decode; they have to compile and fit, spills do not matter."""
Found = Iterator[tuple[str, Resources, bool]]


def layout_for(kv_cache_dtype: str, head_dim: int, block_size: int):
    """Two layers, 16-bit compute as the format has it."""
    compute = "fp16" if kv_cache_dtype == "fp16" else "bf16"
    k_format, v_format = parse_kv_cache_dtype(kv_cache_dtype, compute=compute)
    return page_layout(k_format, v_format, block_size, 2, 2, head_dim, tail_format=compute)


def decode(cases: Iterator[tuple[str, int, int, int, int]]) -> Found:
    """The kernels that must not spill."""
    for name, head_dim, group, block_size, capability in cases:
        label = f"decode {name} head_dim {head_dim} group {group} block {block_size} sm_{capability}"
        yield label, attention(layout_for(name, head_dim, block_size), group, capability), True


def others(formats: tuple[str, ...], head_dims: tuple[int, ...], capabilities: tuple[int, ...]) -> Found:
    """Every other kernel, by format where it knows of one."""
    for capability, head_dim in itertools.product(capabilities, head_dims):
        for name in formats:
            layout = layout_for(name, head_dim, 16 if head_dim != 128 else 32)
            where = f"{name} head_dim {head_dim} sm_{capability}"
            for max_query, extras in VARIANTS:
                label = f"{'chunk' if max_query > 1 else 'decode'} {'+'.join(extras).lower()} {where}"
                yield label, attention(layout, 4, capability, max_query=max_query, extras=extras), False
            for kernel, found in pages(layout, capability).items():
                yield f"{kernel} {where}", found, False
        for kernel, found in rows(head_dim, 4096, "bf16", capability).items():
            yield f"{kernel} head_dim {head_dim} sm_{capability}", found, False


def problems(found: Resources, capability: int, spills_count: bool) -> list[str]:
    """What is wrong with the needs of one kernel."""
    wrong = []
    if spills_count and (found.stack or found.local):
        wrong.append(f"spills {found.stack} + {found.local} bytes a thread")
    if found.shared > SHARED_LIMIT[capability]:
        wrong.append(f"needs {found.shared} bytes of shared memory of {SHARED_LIMIT[capability]}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Compiles the kernels; exit code 1 if one does not fit its chip or a plain decode kernel spills."""
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.matrix", description=main.__doc__)
    parser.add_argument("--sample", action="store_true", help="a representative few instead of the whole matrix")
    chosen = parser.parse_args(arguments)
    if chosen.sample:
        parts = (decode(iter(SAMPLE)), others(("int8_channel",), (64,), (90,)))
    else:
        every = itertools.product(FORMATS, HEAD_DIMS, GROUPS, BLOCK_SIZES, SHARED_LIMIT)
        parts = (decode(every), others((*FORMATS, "fp32"), HEAD_DIMS, tuple(SHARED_LIMIT)))
    count = failures = 0
    for label, found, spills_count in itertools.chain(*parts):
        wrong = problems(found, int(label.rpartition("_")[2]), spills_count)
        count, failures = count + 1, failures + bool(wrong)
        needs = f"{found.registers:3} registers {found.stack:4} B stack {found.shared:6} B shared"
        print(f"{'BAD' if wrong else 'ok '} {label:70} {needs} {'; '.join(wrong)}", flush=True)
    print(f"{count - failures} of {count} kernels fit")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
