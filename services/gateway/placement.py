"""Finds a worker for each queued request, in order of (priority, arrival).

One worker is asked at a time while the pool is full, so that nobody overtakes the head of the queue; a few otherwise.
After a 429 the loop waits for `event.pool.freed` or for a back-off of 25 to 250 ms, whichever comes first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Protocol

from services.gateway.admission import Admission
from services.gateway.live import Live
from services.gateway.recall import Publishes, Recall, Tasks
from services.gateway.request import Request, State
from services.gateway.watch import Watch
from shared import errors
from shared.clock import Clock
from shared.messages import Accepted, Message, RunPrefill

NEEDED = ("block_manager", "prefill", "decode")
PLACE_TIMEOUT_S = 3.0
PLACING_AT_ONCE = 4
BACKOFF_S = (0.025, 0.25)
FREED_SPACING_S = 0.005  # between two 429s that events woke us for


class Sends(Publishes, Protocol):
    """What placing needs of the bus."""

    async def request(
        self, subject: str, message: Message, reply_type: type[Accepted], *, timeout_s: float
    ) -> Accepted: ...


class Placement:
    """The admission queue and the loop that empties it."""

    def __init__(
        self,
        bus: Sends,
        watch: Watch,
        clock: Clock,
        instance: str,
        tasks: Tasks,
        recall: Recall,
        live: Mapping[str, Live],
        fail: Callable[[Live, errors.KvrelayError], None],
        died: Callable[[str], None],
        *,
        queue_size: int,
        patience_s: float,
    ) -> None:
        self.queue: Admission[Request] = Admission(queue_size)
        self._bus = bus
        self._watch = watch
        self._clock = clock
        self._instance = instance
        self._tasks = tasks
        self._recall = recall
        self._live = live
        self._fail = fail
        self._died = died
        self._patience_s = patience_s
        self._changed = asyncio.Event()
        self._placing = 0
        self._busy = 0  # refusals in a row
        self._resume_at = 0.0
        self._asked_at = 0.0

    def wake(self) -> None:
        """The queue, or who is ready, has changed."""
        self._changed.set()

    def freed(self) -> None:
        """Room appeared, in a pool or at a worker: no need to wait longer."""
        if self._busy:
            self._resume_at = min(self._resume_at, self._asked_at + FREED_SPACING_S)
            self.wake()

    async def run(self) -> None:
        """The placing loop; runs for ever, may be restarted."""
        while True:
            self._changed.clear()
            wait = self._resume_at - self._clock.monotonic()
            if wait <= 0 and self._placing < (1 if self._busy else PLACING_AT_ONCE) and not self._watch.missing(NEEDED):
                request = self.queue.pop()
                if request is not None:
                    self._placing += 1
                    request.place()
                    live = self._live[request.id]
                    self._tasks.spawn(self._order(live), live.context)
                    continue
            try:
                async with asyncio.timeout(wait if wait > 0 and len(self.queue) else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _order(self, live: Live) -> None:
        request = live.request
        attempt = request.attempt
        self._asked_at = self._clock.monotonic()
        try:
            order = RunPrefill(work=request.work(self._instance))
            accepted = await self._bus.request("prefill.run", order, Accepted, timeout_s=PLACE_TIMEOUT_S)
        except errors.KvrelayError as error:
            if request.state is State.PLACING and request.attempt == attempt:
                self._refused(live, error)
        except BaseException:
            self._fail(live, errors.Internal("the gateway failed to place this request"))
            raise
        else:
            self._busy = 0
            if not request.accepted(accepted.worker, attempt, self._clock.monotonic()):
                self._recall.tell(accepted.worker, request.work_id, attempt)
            elif self._watch.gone(accepted.worker):
                self._died(accepted.worker)
        finally:
            self._placing -= 1
            self.wake()

    def _refused(self, live: Live, error: errors.KvrelayError) -> None:
        request, now = live.request, self._clock.monotonic()
        if isinstance(error, errors.Busy):
            request.refused(maybe_started=False)
        elif isinstance(error, (errors.Unavailable, errors.Timeout)):
            request.trouble(error, now)
            request.refused(maybe_started=True)  # a lost connection looks like nobody there
            if request.exhausted(now, self._patience_s):
                self._fail(live, error)
                return
        else:
            self._fail(live, error)
            return
        self._busy += 1
        low, high = BACKOFF_S
        self._resume_at = now + min(high, low * 2 ** min(self._busy - 1, 8)) * random.uniform(0.8, 1.2)
        self.queue.restore(request)
