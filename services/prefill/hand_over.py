"""Giving computed sequences to decode workers, the most important waiting one first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared import errors
from shared.bus import Bus
from shared.clock import Clock
from shared.messages import Accepted, StartDecode
from shared.token_items import Preempted

START_S = 5.0
BUSY_LIMIT_S = 5.0
ABSENT_LIMIT_S = 5.0
RETRY_S = 0.02


@dataclass(eq=False, slots=True)
class _Waiting:
    rank: tuple[int, float]


class HandOver:
    """The queue in front of `decode.start`, which any decode worker with room answers."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def __call__(self, start: StartDecode, stopped: Callable[[], errors.KvrelayError | None]) -> str:
        """The instance that took the sequence over. `stopped()` is asked between tries and raised if it says so.

        If nobody has room for a while, raises Preempted: waiting prompts must not hold the pages that running sequences
        need to finish. If nobody is there for a while, or a start was not answered, raises Unavailable: the start may
        have happened, and a second one elsewhere would make two sequences of one.
        """
        me = _Waiting((start.work.priority, start.work.arrival_s))
        began = self._clock.monotonic()
        self._waiting.append(me)
        try:
            while True:
                error = stopped()
                if error is not None:
                    raise error
                waited = self._clock.monotonic() - began
                if min(self._waiting, key=lambda other: other.rank) is me:
                    try:
                        return (await self._bus.request("decode.start", start, Accepted, timeout_s=START_S)).worker
                    except (errors.Timeout, errors.Conflict) as unclear:  # Conflict: another worker has it already
                        raise errors.Unavailable("it is not known who took the hand-over") from unclear
                    except errors.Unavailable as absent:
                        if isinstance(absent, errors.Stale) or waited > ABSENT_LIMIT_S:
                            raise
                    except errors.Busy:
                        pass
                if waited > BUSY_LIMIT_S:
                    raise Preempted("no decode worker has room; the request waits its turn again")
                await self._clock.sleep(RETRY_S)
        finally:
            self._waiting.remove(me)
