"""Tail slots: one per running sequence, exclusive to its lease; a transfer may hold one a little longer."""

from __future__ import annotations

import numpy as np


class Tails:
    """Slots 0 … slots-1. `generations` is their part of the pool's shared array, raised before a slot is granted."""

    def __init__(self, slots: int, generations: np.ndarray) -> None:
        self.total = slots
        self.generations = generations
        self._free = list(range(slots - 1, -1, -1))
        self._holders = [0] * slots

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A slot with one holder. Raises IndexError when there is none."""
        slot = self._free.pop()
        self._holders[slot] = 1
        self.generations[slot : slot + 1] += 1  # as an array, which goes from 2³²−1 to 0 without a warning
        return slot

    def hold(self, slot: int) -> None:
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        if self._holders[slot] < 1:
            raise ValueError(f"tail {slot} is not held")
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def check(self, holders: np.ndarray) -> list[str]:
        """Everything that is wrong; `holders` counts, per slot, the leases, transfers and fences that hold it."""
        rules = {
            "tail holders equal what leases, transfers and fences hold": self._holders == holders.tolist(),
            "free tails are exactly those without holder": sorted(self._free)
            == [slot for slot, held in enumerate(self._holders) if not held],
        }
        return [rule for rule, holds in rules.items() if not holds]
