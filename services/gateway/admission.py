"""The admission queue: bounded, ordered by (priority, arrival). Pure.

A request that comes back from a worker (preempted, worker lost) goes to its original place and is never refused: it was
admitted already, and refusing it would break a stream that a client is reading.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

from shared.errors import Busy


class Ranked(Protocol):
    """What the queue orders by: lower `priority` first, older `arrival_s` first within one."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...


T = TypeVar("T", bound=Ranked)


class Admission(Generic[T]):
    """A priority queue that takes newcomers while it holds fewer than `bound` requests."""

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise ValueError("the admission queue needs room for at least one request")
        self.bound = bound
        self._heap: list[tuple[int, float, int, T]] = []
        self._waiting: dict[str, int] = {}  # id → ticket of its only valid heap entry
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def admit(self, request: T) -> None:
        """Queues a newcomer; Busy when the queue is full."""
        if len(self._waiting) >= self.bound:
            raise Busy(f"{len(self._waiting)} requests are waiting already; try again soon", retry_after_s=1.0)
        self.restore(request)

    def restore(self, request: T) -> None:
        """Queues a request that was admitted before, at its original place and regardless of the bound."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is queued already")
        self._ticket += 1
        self._waiting[request.id] = self._ticket
        heapq.heappush(self._heap, (request.priority, request.arrival_s, self._ticket, request))

    def pop(self) -> T | None:
        """Takes out the request whose turn it is."""
        while self._heap:
            _, _, ticket, request = heapq.heappop(self._heap)
            if self._waiting.get(request.id) == ticket:
                del self._waiting[request.id]
                return request
        return None

    def remove(self, request_id: str) -> bool:
        """Drops a request; False if it is not queued. Its heap entry is skipped later."""
        found = self._waiting.pop(request_id, None) is not None
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[3].id) == entry[2]]
            heapq.heapify(self._heap)
        return found

    def waiting(self) -> list[T]:
        """Everything queued, in order."""
        entries = sorted(self._heap, key=lambda entry: entry[:3])
        return [request for _, _, ticket, request in entries if self._waiting.get(request.id) == ticket]
