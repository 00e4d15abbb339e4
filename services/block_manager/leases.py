"""What the ledger remembers of a lease, and what it answers about several."""

from __future__ import annotations

from dataclasses import dataclass, field


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
