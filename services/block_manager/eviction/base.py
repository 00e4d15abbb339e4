"""SEAM: which cached page goes first. One policy per file; the module has `create(blocks) -> EvictionPolicy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator


class EvictionPolicy(ABC):
    """The evictable pages: committed, not referenced, not pinned. Block indices are 0 … blocks-1.

    The ledger calls `add` when a page becomes evictable (a request's pages tail first, so that a prefix outlives its
    suffixes), `remove` when it is used again, and `pop` to evict. A page is never added twice.
    """

    @abstractmethod
    def add(self, block: int) -> None:
        """`block` is evictable from now on. It must not be held already."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """`block` is no longer evictable. It must be held."""

    @abstractmethod
    def pop(self) -> int:
        """Removes and returns the page to evict. Raises LookupError when there is none."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """All held pages, the next victim first."""
