"""SEAM: a place pages can be read from and written to, one kind per file.

A tier knows whether handles still name what it holds (`check`, raising Stale; called before and after every copy, so
`read` and `write` need not), and moves runs of whole pages between itself and memory. Calls come from mover threads;
two copies never have the same target page. Anything that fails raises: the caller's fallback is to recompute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from shared.handles import BlockTable, TailHandle


class Tier(ABC):
    @abstractmethod
    def check(self, table: BlockTable, tail: TailHandle | None) -> None:
        """Raises Stale unless every handle still names its tenant."""

    @abstractmethod
    def read(self, first: int, into: np.ndarray) -> None:
        """Pages `first …` → `into`, uint8 [pages, page_bytes]."""

    @abstractmethod
    def write(self, first: int, pages: np.ndarray) -> None:
        """`pages`, uint8 [pages, page_bytes] → pages `first …`."""

    def window(self, first: int, count: int) -> np.ndarray | None:
        """Pages `first …` as uint8 [count, page_bytes] in place, if this tier is memory; else None."""
        return None

    def tail(self, slot: int) -> np.ndarray:
        """A tail slot, uint8 [tail_bytes], in place. Only memory has tails; others raise NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} holds no tails")
