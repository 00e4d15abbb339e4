"""The block manager's dealings with the mover: order a copy, and find out what became of one that was not answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from services.block_manager.transfers import Transfer, Transfers
from shared import logs
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import BadRequest, Busy, Conflict, KvrelayError, NotFound, Stale, Unauthorized, Unavailable
from shared.messages import Copied, Copy, Settle, Settled

SETTLE_TIMEOUT_S: Final = 1.0
SILENT_S: Final = 5.0
"""A mover unheard for this long is not given work."""
VANISHED_S: Final = 60.0
"""A mover unheard for this long writes no more: it checks its deadline between pieces of a few milliseconds."""
COPY_S: Final = 3.0
COPY_SHARE: Final = 0.6
AWAIT_S: Final = 1.0
AWAIT_SHARE: Final = 0.25
GRACE_S: Final = 2.0
"""A mover that took a copy and then stopped answering has announced itself by this time."""

_PROVEN = (Stale, NotFound, BadRequest, Conflict, Busy, Unauthorized)
"""Errors that the mover answers after it has stopped writing, or that say it never began."""

log = logs.get()


def time_to_copy(budget_s: float | None) -> float:
    """Seconds a copy may take for a caller who waits `budget_s` (None: for ever): a miss is answered in time too."""
    return COPY_S if budget_s is None else min(COPY_S, COPY_SHARE * budget_s)


def time_to_wait(budget_s: float | None) -> float:
    """The same for waiting until pages arrive that another request is already bringing in."""
    return AWAIT_S if budget_s is None else min(AWAIT_S, AWAIT_SHARE * budget_s)


class Outcome(Enum):
    COPIED = "copied"
    FAILED = "failed"
    UNPROVEN = "unproven"


@dataclass(slots=True)
class _Doubt:
    since: float
    cleared: set[str] = field(default_factory=set)


class Copies:
    """Movers are known by their heartbeats. An unanswered copy is proven finished once each mover that may have taken
    it says so, has exited, or has vanished."""

    def __init__(self, bus: Bus, transfers: Transfers, clock: Clock) -> None:
        self._bus = bus
        self._transfers = transfers
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._doubts: dict[int, _Doubt] = {}

    @property
    def available(self) -> bool:
        """Whether there is a mover to ask."""
        now = self._clock.monotonic()
        return any(now - heard < SILENT_S for heard in self._heard.values())

    @property
    def prompt(self) -> bool:
        """Whether a copy may be expected to be quick: there is a mover, and none of its answers is outstanding."""
        return self.available and not self._transfers.unproven()

    def heard(self, instance: str) -> None:
        self._heard[instance] = self._clock.monotonic()

    def exited(self, instance: str) -> None:
        """This mover's process has ended; nothing of it writes any more."""
        self._heard.pop(instance, None)

    async def order(self, transfer: Transfer, timeout_s: float) -> Outcome:
        """Has the bytes copied and verified; says what is known about them afterwards. Never raises."""
        source, target = transfer.tables()
        source_tail, target_tail = transfer.tails()
        message = Copy(
            transfer=transfer.transfer,
            source=source,
            target=target,
            source_tail=source_tail,
            target_tail=target_tail,
        )
        try:
            copied = await self._bus.request("offload.copy", message, Copied, timeout_s=timeout_s)
        except _PROVEN as error:
            log.warning("pages not copied", transfer=transfer.transfer, error=error.text)
            return Outcome.FAILED
        except KvrelayError as error:
            log.warning("copy unproven", transfer=transfer.transfer, error=error.text)
            return Outcome.UNPROVEN
        complete = copied.transfer == transfer.transfer and copied.pages == len(target)
        return Outcome.COPIED if complete else Outcome.FAILED

    async def settle(self) -> bool:
        """Asks about every unproven transfer once; whether one could be closed. Call it every second or so."""
        now = self._clock.monotonic()
        closed = False
        for instance in [name for name, heard in self._heard.items() if now - heard >= VANISHED_S]:
            del self._heard[instance]
        for transfer in self._transfers.unproven():
            doubt = self._doubts.setdefault(transfer.transfer, _Doubt(now))
            for instance in [name for name in self._heard if name not in doubt.cleared]:
                if await self._finished(instance, transfer.transfer):
                    doubt.cleared.add(instance)
            if now - doubt.since >= GRACE_S and doubt.cleared.issuperset(self._heard):
                del self._doubts[transfer.transfer]
                self._transfers.done(transfer.transfer)
                log.info("quarantined pages are free again", transfer=transfer.transfer)
                closed = True
        return closed

    async def _finished(self, instance: str, transfer: int) -> bool:
        try:
            answer = await self._bus.request(
                f"offload.settle.{instance}", Settle(transfer=transfer), Settled, timeout_s=SETTLE_TIMEOUT_S
            )
        except KvrelayError:
            return False
        return not answer.running

    def require(self) -> None:
        """Raises Unavailable unless there is a mover to ask."""
        if not self.available:
            raise Unavailable("no offload actor runs, so pages cannot be copied between pools", retry_after_s=1.0)
