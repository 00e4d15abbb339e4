"""Pages and tails kept from being recycled though no lease holds them: transfers, and fences round the vanished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.block_manager.leases import LeaseRecord
from services.block_manager.pages import FILLING, Pages
from services.block_manager.tails import Tails

FENCE_S: Final = 60.0
"""A holder that has not been heard of for this long after its lease ran out writes no more."""


@dataclass(slots=True, eq=False)
class Hold:
    """A transfer's hold has references of its own. A fenced one keeps pages quarantined, whose writer could not be
    proven finished; `holder` and `until_s` are set if that writer was a worker whose lease ran out."""

    pages: list[int]
    tail: int | None = None
    fenced: bool = False
    holder: str | None = None
    until_s: float | None = None


class Holds:
    """All holds on one pool's pages and tails."""

    def __init__(self, pages: Pages, tails: Tails) -> None:
        self._pages, self._tails = pages, tails
        self._all: set[Hold] = set()

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._all)

    def hold(self, pages: list[int], tail: int | None = None) -> Hold:
        """Keeps pages and a tail from being recycled, whatever becomes of their lease, until `let_go`."""
        hold = Hold(pages, tail)
        self._pages.hold(pages)
        if tail is not None:
            self._tails.hold(tail)
        self._all.add(hold)
        return hold

    def quarantine(self, hold: Hold) -> None:
        """Somebody may still be writing into the held FILLING pages: nobody gets them before `let_go`."""
        hold.fenced = True
        for block in hold.pages:
            self._pages.quarantine(block)
        self._pages.drop(reversed(hold.pages))

    def let_go(self, hold: Hold) -> None:
        """Ends a hold, fenced or not."""
        self._all.remove(hold)
        if hold.fenced:
            for block in hold.pages:
                self._pages.lift(block)
        else:
            self._pages.drop(reversed(hold.pages))
        if hold.tail is not None:
            self._tails.drop(hold.tail)

    # --- fences ------------------------------------------------------------------------------------------------------

    def fence(self, record: LeaseRecord, now_s: float) -> None:
        """Keeps what the holder of this lease, which ran out, may still be writing: unfinished pages and the tail."""
        hold = self.hold([block for block in record.pages if self._pages.state[block] == FILLING], record.tail)
        hold.holder, hold.until_s = record.holder, now_s + FENCE_S
        self.quarantine(hold)

    def warned(self, holder: str, until_s: float) -> None:
        """The holder has just heard that its lease is lost; it stops writing before `until_s`."""
        for hold in self._all:
            if hold.holder == holder and hold.until_s is not None:
                hold.until_s = min(hold.until_s, until_s)

    def gone(self, holder: str) -> None:
        """The holder's process is proven dead."""
        for hold in [hold for hold in self._all if hold.holder == holder]:
            self.let_go(hold)

    def expire(self, now_s: float) -> None:
        for hold in [hold for hold in self._all if hold.until_s is not None and hold.until_s <= now_s]:
            self.let_go(hold)
