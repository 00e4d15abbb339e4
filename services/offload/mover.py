"""Copies pages in threads of its own. numpy and the driver release the GIL meanwhile, so the event loop stays free."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from services.offload.tiers.base import PoolTier, Tier
from services.offload.tiers.cuda import CudaTier
from services.offload.tiers.memory import MemoryTier
from shared.errors import Cancelled, Conflict
from shared.handles import BlockTable, TailHandle, unpack_u32
from shared.messages import Copied

PIECE_BYTES: Final = 8 << 20
"""A copy looks for its cancellation after each piece: a few milliseconds."""
UNDER_WAY_BYTES: Final = 16 * PIECE_BYTES
"""How far ahead of a GPU copies are begun."""


@dataclass(frozen=True, slots=True)
class Side:
    """Where a copy reads or writes."""

    tier: Tier
    table: BlockTable
    tail: TailHandle | None = None

    def check(self) -> None:
        self.tier.check(self.table, self.tail)


@dataclass(slots=True)
class Job:
    """One transfer under way. After `cancel` it stops at the next piece; `done` says nothing is written any more."""

    transfer: int
    done: Future[Copied] = field(default_factory=Future)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class Mover:
    """At most `threads` copies at once, the others wait in order. `running` names every transfer not yet finished."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mover")
        self._jobs: dict[int, Job] = {}

    @property
    def running(self) -> list[int]:
        return list(self._jobs)

    def submit(self, transfer: int, source: Side, target: Side) -> Job:
        """Starts a copy of all pages of `source.table` to those of `target.table`, one for one, and of the tail.

        The future gives Copied once both sides have been checked after the copy, or Stale, Cancelled, or what the tier
        raised. A transfer that is under way already is not started again. Raises Conflict for tables of unlike length.
        """
        if transfer in self._jobs:
            return self._jobs[transfer]
        if len(source.table) != len(target.table) or (source.tail is None) != (target.tail is None):
            raise Conflict(f"transfer {transfer} does not name one target for each source")
        if source.tier.page_bytes != target.tier.page_bytes:
            raise Conflict(f"pages of {source.table.pool} and {target.table.pool} differ in size")
        job = Job(transfer)
        self._jobs[transfer] = job
        self._threads.submit(self._run, job, source, target)
        return job

    def close(self) -> None:
        """Stops what runs at its next piece and waits for it."""
        for job in list(self._jobs.values()):
            job.cancel()
        self._threads.shutdown(wait=True)

    def _run(self, job: Job, source: Side, target: Side) -> None:
        try:
            result = _copy(job, source, target)
        except BaseException as error:
            del self._jobs[job.transfer]  # before anybody hears of the end
            job.done.set_exception(error)
        else:
            del self._jobs[job.transfer]
            job.done.set_result(result)


def _copy(job: Job, source: Side, target: Side) -> Copied:
    started = time.perf_counter()
    source.check()
    target.check()
    try:
        copied = _begin(job, source, target)
    finally:
        _finish(source, target)
    source.check()
    target.check()
    return Copied(transfer=job.transfer, pages=len(source.table), bytes=copied, seconds=time.perf_counter() - started)


def _begin(job: Job, source: Side, target: Side) -> int:
    """Bytes whose copies have begun."""
    width, under_way = source.tier.page_bytes, 0
    step = max(1, PIECE_BYTES // width)
    for first, to, count in runs(unpack_u32(source.table.indices), unpack_u32(target.table.indices)):
        for at in range(0, count, step):
            if under_way >= UNDER_WAY_BYTES:
                _finish(source, target)
                under_way = 0
            if job.cancelled.is_set():
                raise Cancelled(f"transfer {job.transfer} was cancelled")
            some = min(step, count - at)
            _move(source.tier, first + at, target.tier, to + at, some)
            under_way += some * width
    copied = width * len(source.table)
    if source.tail is not None and target.tail is not None:
        copied += _move_tail(source.tier, source.tail.slot, target.tier, target.tail.slot)
    return copied


def _finish(source: Side, target: Side) -> None:
    """Whatever came before: afterwards nothing is read or written any more."""
    try:
        source.tier.finish()
    finally:
        target.tier.finish()


def _move(source: Tier, first: int, target: Tier, to: int, count: int) -> None:
    if isinstance(target, MemoryTier):
        source.read(first, target.window(to, count))
    elif isinstance(source, MemoryTier):
        target.write(to, source.window(first, count))
    elif isinstance(source, CudaTier) and isinstance(target, CudaTier):
        source.send(first, target, to, count)
    else:
        raise Conflict("one side of a copy must be host memory, or both on GPUs")


def _move_tail(source: Tier, slot: int, target: Tier, to: int) -> int:
    """Bytes of the tail."""
    if not isinstance(source, PoolTier) or not isinstance(target, PoolTier):
        raise Conflict("only pools have tails")
    if isinstance(target, MemoryTier):
        source.read_tail(slot, target.tail(to))
    elif isinstance(source, MemoryTier):
        target.write_tail(to, source.tail(slot))
    elif isinstance(source, CudaTier) and isinstance(target, CudaTier):
        source.send_tail(slot, target, to)
    else:
        raise Conflict("one side of a copy must be host memory, or both on GPUs")
    return source.tail_bytes


def runs(sources: np.ndarray, targets: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of the longest stretches that are contiguous on both sides."""
    if not len(sources):
        return
    breaks = np.flatnonzero((np.diff(sources.astype(np.int64)) != 1) | (np.diff(targets.astype(np.int64)) != 1)) + 1
    edges = [0, *breaks.tolist(), len(sources)]
    for begin, end in pairwise(edges):
        yield int(sources[begin]), int(targets[begin]), end - begin
