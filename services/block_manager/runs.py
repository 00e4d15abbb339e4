"""Free pages as maximal runs, so that grants are contiguous whenever the pool allows it."""

from __future__ import annotations

from typing import Final

_PROBES: Final = 16


class FreeRuns:
    """The set of free block indices. All operations are O(1) per run touched.

    Runs are kept by both ends, for merging, and in buckets by the bit length of their size, for finding one that fits.
    """

    def __init__(self, blocks: int) -> None:
        self._length: dict[int, int] = {}  # first block → length
        self._start: dict[int, int] = {}  # block behind the last → first block
        self._buckets: list[dict[int, None]] = [{} for _ in range(blocks.bit_length() + 1)]
        self._free = 0
        if blocks:
            self._insert(0, blocks)
            self._free = blocks

    def __len__(self) -> int:
        return self._free

    def runs(self) -> dict[int, int]:
        """First block → length of every run; a copy, for checks and tests."""
        return dict(self._length)

    def add(self, block: int) -> None:
        """Gives one block back and merges it with its neighbours. It must not be free already."""
        start, length = block, 1
        before = self._start.get(block)
        if before is not None:
            start, length = before, self._remove(before) + 1
        if block + 1 in self._length:
            length += self._remove(block + 1)
        self._insert(start, length)
        self._free += 1

    def take(self, count: int, near: int | None = None) -> list[int]:
        """Takes `count` blocks (there must be that many): first the run that begins at `near`, so that a growing
        sequence stays contiguous, then the smallest run found that holds the rest, else the largest ones."""
        taken: list[int] = []
        if near is not None and near in self._length:
            self._cut(near, min(count, self._length[near]), taken)
        while len(taken) < count:
            need = count - len(taken)
            start = self._fitting(need)
            self._cut(start, min(need, self._length[start]), taken)
        self._free -= count
        return taken

    def _fitting(self, need: int) -> int:
        buckets, length = self._buckets, self._length
        best = -1
        for probes, start in enumerate(buckets[min(need.bit_length(), len(buckets) - 1)]):
            if length[start] >= need and (best < 0 or length[start] < length[best]):
                best = start
            if probes >= _PROBES:
                break
        if best >= 0:
            return best
        for bucket in buckets[need.bit_length() + 1 :]:
            if bucket:
                return next(iter(bucket))
        for bucket in reversed(buckets):
            if bucket:
                candidates = (start for start, _ in zip(bucket, range(_PROBES), strict=False))
                return max(candidates, key=length.__getitem__)
        raise LookupError("no free block")

    def _cut(self, start: int, count: int, into: list[int]) -> None:
        length = self._remove(start)
        into.extend(range(start, start + count))
        if count < length:
            self._insert(start + count, length - count)

    def _insert(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        self._buckets[length.bit_length()][start] = None

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start[start + length]
        del self._buckets[length.bit_length()][start]
        return length
