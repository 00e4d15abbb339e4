"""Having kernels compiled and decode steps captured before the first request, on backends that do either on first use.

Which kernel is needed depends on how many programs there are to share the pages of a sequence: on the number of
sequences and on the longest. Powers of two reach every case, as the kernels and the graphs know no others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.attention import Batch, SharedPrefix
from kernels.shared_prefix import LEAST_PAGES, MEMBERS
from shared.models.kv_step import KVStep
from shared.models.runtime import Memory
from shared.models.transformer import Transformer


def on_first_use(model: Transformer) -> bool:
    """Whether kernels of this model's backend are compiled when they are first called."""
    return model.ops.name == "triton"


def powers(most: int) -> Iterator[int]:
    """1, 2, 4, … and `most` itself."""
    value = 1
    while value < most:
        yield value
        value *= 2
    yield most


def run_decode_steps(
    model: Transformer, memory: Memory, most_rows: int, width: int, scales: torch.Tensor | None, shares: bool
) -> None:
    """One decode step of every number of sequences up to `most_rows` and pages up to `width` that makes a difference;
    with shared pages too, if decode `shares` them. The sequences are empty: nothing of `memory` is read or written.
    """
    nothing = torch.zeros(most_rows, dtype=torch.int32)
    nobody = torch.full((most_rows,), -1, dtype=torch.int32)
    tables, starts = torch.zeros(most_rows, width, dtype=torch.int32), torch.arange(most_rows + 1, dtype=torch.int32)
    for rows in powers(most_rows):
        zeros = torch.zeros(rows, dtype=torch.int64)
        for pages in powers(width):
            for together in (False, True) if shares and rows > 1 and pages >= LEAST_PAGES else (False,):
                batch = Batch(
                    tables[:rows], nothing[:rows], nothing[:rows], nothing[:rows], starts[: rows + 1],
                    max_pages=pages, max_query=1, shared=_no_groups(rows) if together else None,
                )  # fmt: skip
                step = KVStep(
                    memory.pages, memory.tails, memory.layout, batch, nobody[:rows], nothing[:rows], scales=scales
                )
                model.forward(zeros, zeros, step, list(range(rows)))
    memory.fence()


def _no_groups(rows: int) -> SharedPrefix:
    nothing = torch.zeros(rows + 1, dtype=torch.int32)
    groups = rows // 2
    return SharedPrefix(nothing[:rows], nothing[: groups + 1], nothing[:groups], nothing[:rows], min(MEMBERS, rows))
