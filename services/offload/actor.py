"""The offload actor: moves what the block manager orders, and says so when it is done. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar, Final

from services.offload.holdings import Holdings
from services.offload.mover import Mover, Side
from services.offload.tiers.base import PoolTier
from services.offload.tiers.cuda import CudaTier
from services.offload.tiers.memory import MemoryTier
from shared.actor import Actor, Call, handles, listens
from shared.errors import KvrelayError, Misconfigured, Stale
from shared.handles import BlockTable
from shared.messages import Attach, Copied, Copy, PoolCreated, PoolDescription, Settle, Settled
from shared.pool import attach
from shared.pool.cuda_driver import DeviceFailed
from shared.pool.cuda_ipc import CudaPool
from shared.settings import OffloadSettings

ATTACH_TIMEOUT_S: Final = 2.0
LOOK_S: Final = 0.5


class Offload(Actor):
    """Keeps the pools of its settings open, if they are two: a GPU context and page-locked memory take a while."""

    name: ClassVar[str] = "offload"
    Settings = OffloadSettings
    settings: OffloadSettings

    async def setup(self) -> None:
        self._mover = Mover()
        self._holdings = Holdings()
        self._opening = asyncio.Lock()
        self._look = asyncio.Event()
        self._copied_pages = self._copied_bytes = 0
        pools = sorted({self.settings.prefill_pool, self.settings.decode_pool})
        self._wanted = pools if len(pools) > 1 else []
        self.supervise("pools", self._keep_open)

    async def teardown(self) -> None:
        if hasattr(self, "_mover"):
            await asyncio.to_thread(self._mover.close)
            await asyncio.to_thread(self._holdings.close)

    def unready(self) -> str:
        missing = [pool for pool in self._wanted if not self._holdings.has(pool)]
        return f"waiting for {' and '.join(missing)} of the block manager" if missing else ""

    def details(self) -> dict[str, Any]:
        if not hasattr(self, "_mover"):
            return {}
        return {
            "copying": len(self._mover.running),
            "copied_pages": self._copied_pages,
            "copied_bytes": self._copied_bytes,
        }

    @handles("copy", Copy)
    async def copy(self, message: Copy, call: Call) -> Copied:
        held: list[PoolTier] = []
        try:
            held.append(await self._hold(message.source))
            held.append(await self._hold(message.target))
            job = self._mover.submit(
                message.transfer,
                Side(held[0], message.source, message.source_tail),
                Side(held[1], message.target, message.target_tail),
            )
        except BaseException:
            self._holdings.release(held)
            raise
        job.done.add_done_callback(lambda _: self._holdings.release(held))
        try:
            copied = await asyncio.shield(asyncio.wrap_future(job.done))
        except asyncio.CancelledError:
            job.cancel()
            raise
        except DeviceFailed as error:
            self.log.error("a GPU failed; its state is unknown until this process has ended", error=error.text)
            self.failure = error
            self.failed.set()
            raise
        self._copied_pages += copied.pages
        self._copied_bytes += copied.bytes
        return copied

    @handles("settle", Settle, to="instance")
    def settle_transfer(self, message: Settle, call: Call) -> Settled:
        return Settled(transfer=message.transfer, running=message.transfer in self._mover.running)

    @listens("event.pool.created", PoolCreated)
    def created(self, message: PoolCreated, call: Call) -> None:
        """Opens the new incarnation now rather than half a second later."""
        self._look.set()

    async def _keep_open(self) -> None:
        """Opens what copies will need before they need it, and lets go of what is over, as its successor may want the
        memory; a copy that still uses it ends as Stale."""
        while True:
            await asyncio.to_thread(self._holdings.drop_ended)
            try:
                for pool in self._wanted:
                    await self._open(pool)
            except Misconfigured:
                raise
            except KvrelayError as error:
                self.log.debug("a pool is not there yet", reason=error.text)
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_S)

    async def _hold(self, table: BlockTable) -> PoolTier:
        """The pool a table is of, kept open until it is released. Raises Stale for another incarnation."""
        tier = self._holdings.hold(table.pool, table.epoch)
        if tier is None:
            await self._open(table.pool)
            tier = self._holdings.hold(table.pool, table.epoch)
        if tier is None:
            raise Stale(f"pool {table.pool} has been created anew")
        return tier

    async def _open(self, pool: str) -> None:
        """Opens the living incarnation, unless it is open. Raises what the block manager answers, or Stale."""
        async with self._opening:
            if self._holdings.has(pool):
                return
            ask = Attach(holder=self.instance, pool=pool, fingerprint="")
            description = await self.bus.request(
                "block_manager.attach", ask, PoolDescription, timeout_s=ATTACH_TIMEOUT_S
            )
            self._holdings.put(pool, await asyncio.to_thread(_tier, description))
            await asyncio.to_thread(self._page_lock)

    def _page_lock(self) -> None:
        """Host memory that is copied to and from GPUs."""
        devices = [tier.device for tier in self._holdings.tiers if isinstance(tier, CudaTier)]
        for tier in self._holdings.tiers:
            if devices and isinstance(tier, MemoryTier) and not tier.page_lock(devices[0]):
                self.log.info("host memory cannot be page-locked; copies are slower", pages=tier.page_bytes)


def _tier(description: PoolDescription) -> PoolTier:
    pool = attach(description)
    return CudaTier(pool) if isinstance(pool, CudaPool) else MemoryTier(pool)
