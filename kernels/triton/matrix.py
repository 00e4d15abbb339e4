"""The kernels over all formats, widths and architectures, compiled without a GPU: what needs more than a chip has?"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import NamedTuple

from kernels.layout import page_layout, parse_kv_cache_dtype
from kernels.shared_prefix import MEMBERS
from kernels.triton.ahead import SHARED_LIMIT, Resources, attention, pages, rows
from kernels.triton.tuning import tile_key, together_shape

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel", "int4", "k16v4", "k8v4",
           "int8_per_tensor", "fp8_e4m3_per_tensor", "fp8_e5m2_per_tensor", "fp32")  # fmt: skip
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8, 16)
SHARED_GROUPS = (1, 4, 8)
"""Of query heads, for shared pages: tiles of 16 rows, and of 32 rows in one tile and in two."""
BLOCK_SIZES = (16, 32)
CHIPS = tuple(SHARED_LIMIT)
OPTIONS = (("WINDOW",), ("SOFTCAP",), ("PAGE_LSE",), ("WINDOW", "SOFTCAP"), ("SOFTCAP", "PAGE_LSE"))
"""What decode may be asked for beyond the plain result."""
CHUNKS = ((), ("WINDOW", "SOFTCAP"))
"""Options of chunks of prompts, which have to compile and fit; spills do not matter."""


@dataclass(frozen=True)
class Job:
    """Some kernels that are compiled together, for one chip. `compile` is picklable."""

    where: str
    capability: int
    may_spill: bool
    compile: Callable[[], Resources | dict[str, Resources]]

    def __call__(self) -> list[tuple[str, Resources]]:
        found = self.compile()
        named = found.items() if isinstance(found, dict) else (("", found),)
        return [(f"{name} {self.where} sm_{self.capability}".strip(), needs) for name, needs in named]


def layout_for(kv_cache_dtype: str, head_dim: int, block_size: int):
    """Two layers, compute as the format has it: fp16 or fp32 under its name, bf16 for all others."""
    compute = kv_cache_dtype if kv_cache_dtype in ("fp16", "fp32") else "bf16"
    k_format, v_format = parse_kv_cache_dtype(kv_cache_dtype, compute=compute)
    return page_layout(k_format, v_format, block_size, 2, 2, head_dim, tail_format=compute)


class Case(NamedTuple):
    """One kernel that must not spill: decode of `group` query heads a KV head, plain or with `options`."""

    kv_cache_dtype: str
    head_dim: int
    group: int
    block_size: int
    capability: int
    options: tuple[str, ...] = ()


def sample() -> Iterator[Case]:
    """Every format with every head_dim; over them, every format and every head_dim meets every group and every chip."""
    for (i, name), (j, head_dim) in itertools.product(enumerate(FORMATS), enumerate(HEAD_DIMS)):
        yield Case(name, head_dim, GROUPS[(i + j) % 5], BLOCK_SIZES[(i + j // 2) % 2], CHIPS[(i + 2 * j) % 3])


def plain() -> Iterator[Case]:
    """Every case of decode without options."""
    return itertools.starmap(Case, itertools.product(FORMATS, HEAD_DIMS, GROUPS, BLOCK_SIZES, CHIPS))


def shared() -> Iterator[Case]:
    """The two passes of decode over shared pages. The second is plain decode from another page on, so that one group
    of query heads has to do for all."""
    for name, head_dim, block_size, chip in itertools.product(FORMATS, HEAD_DIMS, BLOCK_SIZES, CHIPS):
        layout = layout_for(name, head_dim, block_size)
        if together_shape(*tile_key(layout, layout.layer(0), 1), MEMBERS) is None:
            continue
        for group in SHARED_GROUPS:
            yield Case(name, head_dim, group, block_size, chip, ("TOGETHER",))
        yield Case(name, head_dim, 4, block_size, chip, ("REST",))


def optional() -> Iterator[Case]:
    """Every format and head_dim with every option on every chip, groups and block sizes by turns."""
    combined = itertools.product(FORMATS, HEAD_DIMS, OPTIONS, CHIPS)
    for (name, head_dim, options, chip), group, block_size in zip(combined, cycle(GROUPS[::-1]), cycle(BLOCK_SIZES)):
        yield Case(name, head_dim, group, block_size, chip, options)


def decode(cases: Iterable[Case]) -> Iterator[Job]:
    """Jobs for kernels that must not spill."""
    for name, head_dim, group, block_size, capability, options in cases:
        where = f"decode {'+'.join(options).lower()} {name} head_dim {head_dim} group {group} block {block_size}"
        compile_ = partial(attention, layout_for(name, head_dim, block_size), group, capability, extras=options)
        yield Job(where.replace("  ", " "), capability, False, compile_)


def others(formats: tuple[str, ...], head_dims: tuple[int, ...], capabilities: tuple[int, ...]) -> Iterator[Job]:
    """Every other kernel, by format where it knows of one."""
    for capability, head_dim in itertools.product(capabilities, head_dims):
        for name in formats:
            layout = layout_for(name, head_dim, 16 if head_dim != 128 else 32)
            where = f"{name} head_dim {head_dim}"
            for options in CHUNKS:
                compile_ = partial(attention, layout, 4, capability, max_query=7, extras=options)
                yield Job(f"chunk {'+'.join(options).lower()} {where}", capability, True, compile_)
            yield Job(where, capability, True, partial(pages, layout, capability))
        yield Job(f"head_dim {head_dim}", capability, True, partial(rows, head_dim, 4096, "bf16", capability))


def problems(found: Resources, capability: int, spills_count: bool) -> list[str]:
    """What is wrong with the needs of one kernel."""
    wrong = []
    if spills_count and (found.stack or found.local):
        wrong.append(f"spills {found.stack} + {found.local} bytes a thread")
    if found.shared > SHARED_LIMIT[capability]:
        wrong.append(f"needs {found.shared} bytes of shared memory of {SHARED_LIMIT[capability]}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Compiles the kernels; exit code 1 if one does not fit its chip or a decode kernel spills.

    What Triton's own cache holds is not compiled again, so that an interrupted run goes on where it was.
    """
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.matrix", description=main.__doc__)
    parser.add_argument("--sample", action="store_true", help="a representative few instead of the whole matrix")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many to compile at once")
    chosen = parser.parse_args(arguments)
    if chosen.sample:
        few = [*itertools.islice(shared(), 0, None, 85), *itertools.islice(optional(), 0, None, 43)]
        jobs = [*decode(sample()), *decode(few), *others(("int8_channel",), (64,), (90,))]
    else:
        jobs = [*decode(plain()), *decode(shared()), *decode(optional()), *others(FORMATS, HEAD_DIMS, CHIPS)]
    count = failures = 0
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn"), _end_with_parent) as pool:
        for job, kernels in zip(jobs, pool.map(_run, jobs), strict=True):
            for label, found in kernels:
                wrong = problems(found, job.capability, not job.may_spill)
                count, failures = count + 1, failures + bool(wrong)
                needs = f"{found.registers:3} registers {found.stack:4} B stack {found.shared:6} B shared"
                print(f"{'BAD' if wrong else 'ok '} {label:70} {needs} {'; '.join(wrong)}", flush=True)
    print(f"{count - failures} of {count} kernels fit")
    return 1 if failures else 0


def _end_with_parent() -> None:
    """A worker holds its own queue open, so that nothing else would tell it that its parent was killed."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _run(job: Job) -> list[tuple[str, Resources]]:
    return job()


if __name__ == "__main__":
    sys.exit(main())
