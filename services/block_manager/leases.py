"""The leases on one pool: what is remembered of each, whose they are, and who has to go when there is no room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.errors import Conflict, Stale


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """One running sequence. `pages` in order of position; `decoding` once decode has adopted it."""

    lease: int
    holder: str
    request_id: str
    priority: int
    arrival_s: float
    pages: list[int]
    tail: int
    deadline_s: float
    cached_tokens: int = 0
    decoding: bool = False
    preempting: bool = False

    @property
    def rank(self) -> tuple[int, float, int]:
        """Importance: the smaller, the more important (lower priority number first, then older)."""
        return (self.priority, self.arrival_s, self.lease)


@dataclass(slots=True)
class Extension:
    """Answer to an extend: pages per item (empty: no room), whom to preempt, and leases that do not exist."""

    granted: list[list[int]] = field(default_factory=list)
    victim: LeaseRecord | None = None
    lost: list[int] = field(default_factory=list)


class Leases(dict[int, LeaseRecord]):
    """All leases on a pool by id. `unknown` counts messages about leases that are gone or somebody else's."""

    unknown = 0

    def held(self, lease: int, holder: str) -> LeaseRecord | None:
        """The lease if `holder` has it; None, and counted, if not."""
        record = self.get(lease)
        if record is None or record.holder != holder:
            self.unknown += 1
            return None
        return record

    def adopt(self, lease: int, holder: str, deadline_s: float) -> LeaseRecord:
        """`holder` takes the lease over and will decode it. The same holder may ask again; a second one may not."""
        record = self.get(lease)
        if record is None:
            self.unknown += 1
            raise Stale(f"lease {lease} is gone; recompute")
        if record.decoding and record.holder != holder:
            raise Conflict(f"lease {lease} has been adopted by {record.holder} already")
        record.holder, record.decoding, record.deadline_s = holder, True, deadline_s
        return record

    def renew(self, holder: str, leases: Iterable[int], deadline_s: float) -> list[int]:
        """Extends these leases; returns those that `holder` does not have (any more)."""
        lost = []
        for lease in leases:
            record = self.get(lease)
            if record is None or record.holder != holder:
                lost.append(lease)
            else:
                record.deadline_s = deadline_s
        return lost

    def victim(self, references: Sequence[int]) -> LeaseRecord | None:
        """The sequence to preempt: one already asked to go, else the least important one whose end frees a page.

        `references` counts, per page, who holds it.
        """
        running = sorted((record for record in self.values() if record.decoding), key=lambda record: record.rank)
        for record in running:
            if record.preempting:
                return record
        for record in reversed(running[1:]):
            if any(references[block] == 1 for block in record.pages):
                record.preempting = True
                return record
        return None
