"""Decode steps as CUDA graphs: one launch for a whole step instead of a dozen a layer.

A graph is captured for a number of rows (a power of two), a bound on the pages of a sequence (a power of two, which
only decides how work is split), and a bound on the rows that read shared pages together (a power of two, or 0). Its
inputs, what is shared among them, are one buffer on the device, filled by one copy from page-locked memory before every
replay. Rows beyond the batch have no keys, append to slot -1, which the kernels skip, and share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.attention import Batch, SharedPrefix
from shared.models.kv_step import KVStep

Forward = Callable[[torch.Tensor, torch.Tensor, KVStep, torch.Tensor], torch.Tensor]
WARM_UPS = 2


@dataclass(slots=True)
class _Captured:
    """A graph knows addresses only: everything it reads that was allocated before the capture is kept here with it."""

    graph: torch.cuda.CUDAGraph
    staging: torch.Tensor
    inputs: torch.Tensor
    step: KVStep
    wanted: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs over one pool's memory; another pool, or another width of the tables, starts afresh."""

    def __init__(self, device: torch.device, forward: Forward) -> None:
        self._device, self._forward = device, forward
        self._graphs: dict[tuple[int, int, int], _Captured] = {}
        self._of: tuple[int, int, int, int] | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._logits: dict[int, torch.Tensor] = {}  # by rows: all graphs of as many write to the same

    @staticmethod
    def possible(kv: KVStep, count: int, rows: int) -> bool:
        """Plain decode: one query a sequence, whose logits are all wanted."""
        batch = kv.batch
        return kv.seal_blocks is None and batch.max_query == 1 and batch.kv_head_tables is None and count == rows > 0

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, kv: KVStep) -> torch.Tensor:
        """Logits float32 [T, vocab] on the device; they are overwritten by the next step."""
        count, width = tokens.numel(), kv.batch.tables.stride(0)
        scales = 0 if kv.scales is None else kv.scales.data_ptr()
        of = (kv.pages.data_ptr(), kv.tails.data_ptr(), width, scales)
        if of != self._of:
            self._graphs.clear()
            self._of = of
        shared = kv.batch.shared
        together = 0 if shared is None else _power(shared.max_members)
        key = (_power(count), min(_power(max(kv.batch.max_pages, 1)), width), together)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(kv, *key, width)
        rows = key[0]
        fields = _fields(found.staging, rows, width)
        fields[0][:count], fields[1][:count] = tokens, positions
        given = (kv.batch.page_counts, kv.batch.tail_slots, kv.batch.tail_lengths, kv.append_slots, kv.append_positions)
        for field, values in zip(fields[2:7], given, strict=True):
            field[:count] = values
        fields[7][:count, : kv.batch.max_pages] = kv.batch.tables[:, : kv.batch.max_pages]
        for field, padding in zip(fields[:7], (0, 0, 0, 0, 0, -1, 0), strict=True):
            field[count:] = padding
        if shared is not None:
            _copy_shared(shared, _shared(found.staging, rows, width, together))
        found.inputs.copy_(found.staging, non_blocking=True)
        found.graph.replay()
        return found.logits[:count]

    def _capture(self, kv: KVStep, rows: int, max_pages: int, together: int, width: int) -> _Captured:
        staging = page_locked(_sizes(rows, width)[-1].stop)
        _fields(staging, rows, width)[5].fill_(-1)
        inputs = staging.to(self._device)
        tokens, positions, counts, slots, lengths, append_slots, append_positions, tables = _fields(inputs, rows, width)
        batch = Batch(
            tables=tables,
            page_counts=counts,
            tail_slots=slots,
            tail_lengths=lengths,
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self._device),
            max_pages=max_pages,
            max_query=1,
            shared=_shared(inputs, rows, width, together) if together else None,
        )
        scales = None if kv.scales is None else kv.scales.to(self._device)
        step = KVStep(kv.pages, kv.tails, kv.layout, batch, append_slots, append_positions, scales=scales)
        wanted = torch.arange(rows, device=self._device)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # compiles what must not be compiled while capturing
                warm = self._forward(tokens.long(), positions.long(), step, wanted)
        torch.cuda.current_stream(self._device).wait_stream(side)
        logits = self._logits.setdefault(rows, torch.empty_like(warm))
        graph = torch.cuda.CUDAGraph()
        # thread_local: the event loop may map a pool meanwhile, which must not end the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits.copy_(self._forward(tokens.long(), positions.long(), step, wanted))
        return _Captured(graph, staging, inputs, step, wanted, logits)


def page_locked(size: int) -> torch.Tensor:
    """int32 [size] zeros in host memory that the device reads by itself."""
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)


def _sizes(rows: int, width: int) -> list[slice]:
    """Where the parts of a buffer are. Each starts at a multiple of 16 bytes: kernels are compiled for that or without
    it, and there should be one of each for all numbers of rows."""
    groups, parts, at = rows // 2, [], 0
    for size in (*[rows] * 7, rows * width, rows, rows, groups, groups + 1):
        parts.append(slice(at, at + size))
        at += -(-size // 4) * 4
    return parts


def _fields(buffer: torch.Tensor, rows: int, width: int) -> list[torch.Tensor]:
    """Views of the start of `buffer`: seven of [rows], then the tables [rows, width]."""
    fields = [buffer[part] for part in _sizes(rows, width)[:8]]
    return [*fields[:7], fields[7].view(rows, width)]


def _shared(buffer: torch.Tensor, rows: int, width: int, together: int) -> SharedPrefix:
    """Views of the rest of `buffer`: as many groups as there could be."""
    members, first_pages, counts, starts = (buffer[part] for part in _sizes(rows, width)[8:])
    return SharedPrefix(members, starts, counts, first_pages, max_members=together)


def _copy_shared(source: SharedPrefix, target: SharedPrefix) -> None:
    """`source` with empty groups, and sequences in no group, up to the sizes of `target`."""
    ends = source.member_starts[-1]
    for values, field, padding in (
        (source.members, target.members, 0),
        (source.member_starts, target.member_starts, ends),
        (source.page_counts, target.page_counts, 0),
        (source.first_pages, target.first_pages, 0),
    ):
        field[: len(values)] = values
        field[len(values) :] = padding


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
