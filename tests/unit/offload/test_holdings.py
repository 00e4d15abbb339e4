"""Pools are closed once, when they are over or replaced, and never under a copy."""

from __future__ import annotations

import numpy as np

from services.offload.holdings import Holdings
from services.offload.tiers.base import PoolTier
from shared.handles import BlockTable, TailHandle


class Counted(PoolTier):
    """Counts how often it is closed."""

    page_bytes = tail_bytes = 0

    def __init__(self, epoch: int) -> None:
        self.epoch, self.over, self.closed = epoch, False, 0

    @property
    def ended(self) -> bool:
        return self.over

    def check(self, table: BlockTable, tail: TailHandle | None) -> None:
        return

    def read(self, first: int, into: np.ndarray) -> None:
        return

    def write(self, first: int, pages: np.ndarray) -> None:
        return

    def read_tail(self, slot: int, into: np.ndarray) -> None:
        return

    def write_tail(self, slot: int, tail: np.ndarray) -> None:
        return

    def finish(self) -> None:
        return

    def close(self) -> None:
        self.closed += 1


def test_only_the_incarnation_that_is_asked_for_is_held() -> None:
    holdings, tier = Holdings(), Counted(7)
    assert holdings.hold("a", 7) is None and not holdings.has("a")
    holdings.put("a", tier)
    assert holdings.hold("a", 8) is None
    assert holdings.hold("a", 7) is tier and holdings.has("a")
    tier.over = True
    assert not holdings.has("a")


def test_what_is_over_is_closed_when_its_last_copy_is_done() -> None:
    holdings, tier = Holdings(), Counted(7)
    holdings.put("a", tier)
    assert holdings.hold("a", 7) is holdings.hold("a", 7) is tier
    holdings.drop_ended()
    assert holdings.tiers == [tier]
    tier.over = True
    holdings.drop_ended()
    holdings.release([tier])
    assert (tier.closed, holdings.tiers, holdings.hold("a", 7)) == (0, [], None)
    holdings.release([tier])
    holdings.drop_ended()
    assert tier.closed == 1


def test_a_copy_inside_one_pool_holds_it_twice() -> None:
    holdings, tier = Holdings(), Counted(7)
    holdings.put("a", tier)
    held = [holdings.hold("a", 7), holdings.hold("a", 7)]
    holdings.close()
    assert tier.closed == 0
    holdings.release([one for one in held if one is not None])
    assert tier.closed == 1


def test_a_replaced_one_goes_and_a_released_one_stays_open() -> None:
    holdings, old, new = Holdings(), Counted(7), Counted(8)
    holdings.put("a", old)
    holdings.put("a", new)
    assert (old.closed, new.closed) == (1, 0)
    assert holdings.hold("a", 8) is new
    holdings.release([new])
    assert new.closed == 0
    holdings.close()
    holdings.close()
    assert new.closed == 1
