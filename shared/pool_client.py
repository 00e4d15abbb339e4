"""A worker's hold on its pool: attach, notice a new incarnation, attach again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shared import logs
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import Conflict, KvrelayError, Misconfigured, Unavailable
from shared.handles import Layout
from shared.messages import Attach, PoolCreated, PoolDescription
from shared.pool import Pool, attach

log = logs.get()

RETRY_S = 0.2
LOOK_S = 0.5
TIMEOUT_S = 2.0


class PoolClient:
    """Keeps one pool mapped. `on_mapped(pool, description)` is awaited for every incarnation, before it may be used;
    `on_ended()` when one has ended, before it is unmapped: on a GPU its successor may need the memory.

    Whoever works in the pool checks epoch and generations itself; this class only decides when to attach again.
    """

    def __init__(
        self,
        bus: Bus,
        holder: str,
        pool: str,
        layout: Layout,
        on_mapped: Callable[[Pool, PoolDescription], Awaitable[None]],
        on_ended: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._ask = Attach(holder=holder, pool=pool, fingerprint=layout.fingerprint)
        self._layout = layout
        self._on_mapped, self._on_ended = on_mapped, on_ended
        self._clock = clock
        self._pool: Pool | None = None
        self._description: PoolDescription | None = None
        self._suspect = asyncio.Event()

    @property
    def description(self) -> PoolDescription | None:
        """Of the incarnation that is mapped and alive; None while there is none."""
        pool = self._pool
        return self._description if pool is not None and pool.live_epoch() == pool.epoch else None

    def require(self) -> PoolDescription:
        """As `description`; raises Unavailable instead of None."""
        if (description := self.description) is None:
            raise Unavailable(f"pool {self._ask.pool} is being created anew", retry_after_s=RETRY_S)
        return description

    def created(self, message: PoolCreated) -> None:
        """`event.pool.created`."""
        if message.pool == self._ask.pool and (self._pool is None or message.epoch != self._pool.epoch):
            self._suspect.set()

    async def attach(self) -> None:
        """Maps the current incarnation; waits for a block manager that is starting.

        Raises Misconfigured if it serves another model, format or layout: waiting would not help.
        """
        waited = False
        while True:
            try:
                description = await self._bus.request(
                    "block_manager.attach", self._ask, PoolDescription, timeout_s=TIMEOUT_S
                )
                if description.layout != self._layout:
                    raise Conflict("its layout is another one")
                pool = attach(description)
                break
            except Conflict as error:
                text = f"pool {self._ask.pool} does not fit this worker's model and cache settings: {error.text}"
                raise Misconfigured(text) from error
            except KvrelayError as error:
                if not error.retryable:
                    raise
                if not waited:
                    log.info("waiting for the block manager", pool=self._ask.pool, reason=error.text)
                waited = True
                await self._clock.sleep(RETRY_S)
        await self._on_mapped(pool, description)
        self._pool, self._description = pool, description
        log.info("pool attached", pool=pool.name, epoch=pool.epoch, blocks=pool.blocks)

    async def run(self) -> None:
        """Attaches again whenever the incarnation has ended. The event tells at once, a look tells if it was lost."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._suspect.wait()
            except TimeoutError:
                pass
            self._suspect.clear()
            if self.description is None:
                if self._pool is not None:
                    await self._on_ended()
                    self.close()
                await self.attach()

    def close(self) -> None:
        """Unmaps. Call it when nobody computes any more."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
