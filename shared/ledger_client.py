"""A worker's side of the ledger: commits, extensions and releases, batched and in order.

Everything that became due while the last round was under way goes out in the next one, as at most three messages:
commits first (so that released pages are found again), then extensions, then releases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared import logs
from shared.bus import Bus
from shared.errors import KvrelayError
from shared.handles import BlockTable
from shared.messages import Commit, CommitItem, Empty, Extend, Extended, ExtendItem, Message, Release, Renewed

log = logs.get()

TIMEOUT_S = 3.0
STARVED_RETRY_S = 0.05
UNANSWERED_RETRY_S = 0.25
RELEASE_LIMIT_S = 10.0
MAX_ITEMS = 512  # per message, far below the bus's size limit

Reply = TypeVar("Reply", bound=Message)


class LedgerClient:
    """Batches for one `holder`. `on_grant(lease, table)` brings pages, `on_victim(lease)` names whom to preempt,
    `on_lost(leases)` which ones are not ours any more."""

    def __init__(
        self,
        bus: Bus,
        holder: str,
        on_grant: Callable[[int, BlockTable], None] | None = None,
        on_victim: Callable[[int], None] | None = None,
        on_lost: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._bus = bus
        self._holder = holder
        self._on_grant = on_grant
        self._on_victim = on_victim
        self._on_lost = on_lost
        self._commits: list[CommitItem] = []
        self._extends: dict[int, int] = {}
        self._starved: dict[int, int] = {}
        self._releases: dict[int, float] = {}
        self._due = asyncio.Event()
        self._settled = asyncio.Condition()
        self._issued = 0
        self._done = 0
        self._timer: asyncio.TimerHandle | None = None

    def commit(self, lease: int, start: int, keys: bytes) -> None:
        """Publish pages `start …` of the lease, whose bytes are final."""
        self._commits.append(CommitItem(lease=lease, start=start, keys=keys))
        self._wake()

    def extend(self, lease: int, pages: int) -> None:
        """Ask for more pages, and ask again until they are granted or the lease is released."""
        self._extends[lease] = pages
        self._wake()

    def release(self, lease: int) -> None:
        """Give everything under the lease back. Asked again while unanswered, until the lease has run out anyway."""
        self._extends.pop(lease, None)
        self._starved.pop(lease, None)
        self._releases[lease] = asyncio.get_running_loop().time() + RELEASE_LIMIT_S
        self._wake()

    def forget(self, lease: int) -> None:
        """Ask for nothing more under a lease that is no longer ours."""
        self._extends.pop(lease, None)
        self._starved.pop(lease, None)
        self._commits = [item for item in self._commits if item.lease != lease]

    def poke(self) -> None:
        """Room has appeared: ask again for what was refused."""
        if self._starved:
            self._extends = {**self._starved, **self._extends}
            self._starved = {}
            self._wake()

    @property
    def starved(self) -> int:
        """Leases that were told there is no room."""
        return len(self._starved)

    async def settled(self) -> None:
        """Returns when everything asked for before this call has been sent and answered, or given up."""
        target = self._issued
        async with self._settled:
            await self._settled.wait_for(lambda: self._done >= target)

    async def run(self) -> None:
        """The sending loop."""
        while True:
            await self._due.wait()
            self._due.clear()
            issued = self._issued
            try:
                await self._round()
            finally:
                async with self._settled:
                    self._done = issued
                    self._settled.notify_all()

    async def _round(self) -> None:
        commits, self._commits = self._commits, []
        extends, self._extends = self._extends, {}
        releases, self._releases = self._releases, {}
        for at in range(0, len(commits), MAX_ITEMS):
            done = await self._ask("commit", Commit(holder=self._holder, items=commits[at : at + MAX_ITEMS]), Renewed)
            self._lost(done.lost if done is not None else [])
        if extends:
            await self._extend(extends, set(releases))
        leases = list(releases)
        for at in range(0, len(leases), MAX_ITEMS):
            some = leases[at : at + MAX_ITEMS]
            if await self._ask("release", Release(holder=self._holder, leases=some), Empty) is None:
                now = asyncio.get_running_loop().time()
                self._releases |= {lease: releases[lease] for lease in some if releases[lease] > now}
        if self._releases:
            self._again(UNANSWERED_RETRY_S)

    async def _extend(self, extends: dict[int, int], releasing: set[int]) -> None:
        items = [ExtendItem(lease=lease, pages=pages) for lease, pages in extends.items() if lease not in releasing]
        extended = await self._ask("extend", Extend(holder=self._holder, items=items), Extended) if items else None
        if extended is None:
            self._starve({item.lease: item.pages for item in items}, UNANSWERED_RETRY_S)
            return
        refused: dict[int, int] = {}
        lost = set(extended.lost)
        for item, table in zip(items, extended.tables, strict=True):
            if item.lease in lost:
                continue
            if len(table) == 0:
                refused[item.lease] = item.pages
            elif self._on_grant is not None:
                self._on_grant(item.lease, table)
        self._starve(refused, STARVED_RETRY_S)
        if extended.victim is not None and self._on_victim is not None:
            self._on_victim(extended.victim)
        self._lost(extended.lost)

    def _lost(self, leases: list[int]) -> None:
        if leases and self._on_lost is not None:
            self._on_lost(leases)

    def _starve(self, refused: dict[int, int], retry_s: float) -> None:
        dropped = set(self._releases)
        self._starved.update({lease: pages for lease, pages in refused.items() if lease not in dropped})
        if self._starved:
            self._again(retry_s)

    def _again(self, wait_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self.poke()
        if self._releases:
            self._wake()

    async def _ask(self, verb: str, message: Message, reply: type[Reply]) -> Reply | None:
        try:
            return await self._bus.request(f"block_manager.{verb}", message, reply, timeout_s=TIMEOUT_S)
        except KvrelayError as error:
            log.warning("block manager did not do it", verb=verb, holder=self._holder, error=error.text)
            return None

    def _wake(self) -> None:
        self._issued += 1
        self._due.set()
