"""Least recently used: an intrusive doubly linked list, O(1) in everything."""

from __future__ import annotations

from collections.abc import Iterator

from services.block_manager.eviction.base import EvictionPolicy


class LRU(EvictionPolicy):
    """Entry `blocks` of the link arrays is the list's head: its next is the oldest page, its previous the newest."""

    def __init__(self, blocks: int) -> None:
        self._head = blocks
        self._next = [-1] * blocks + [blocks]
        self._previous = [-1] * blocks + [blocks]
        self._held = 0

    def add(self, block: int) -> None:
        if self._next[block] >= 0:
            raise ValueError(f"block {block} is evictable already")
        head, newest = self._head, self._previous[self._head]
        self._next[newest] = block
        self._previous[block] = newest
        self._next[block] = head
        self._previous[head] = block
        self._held += 1

    def remove(self, block: int) -> None:
        after, before = self._next[block], self._previous[block]
        if after < 0:
            raise ValueError(f"block {block} is not evictable")
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = -1
        self._held -= 1

    def pop(self) -> int:
        oldest = self._next[self._head]
        if oldest == self._head:
            raise LookupError("nothing is evictable")
        self.remove(oldest)
        return oldest

    def __len__(self) -> int:
        return self._held

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._head]
        while block != self._head:
            yield block
            block = self._next[block]


def create(blocks: int) -> EvictionPolicy:
    return LRU(blocks)
