"""The offload actor: moves what the block manager orders, and says so when it is done. It decides nothing."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from services.offload.mover import Mover, Side
from services.offload.tiers.memory import MemoryTier
from shared.actor import Actor, Call, handles, listens
from shared.errors import Stale
from shared.messages import Attach, Copied, Copy, PoolCreated, PoolDescription, Settle, Settled
from shared.pool import Pool, attach
from shared.settings import OffloadSettings

ATTACH_TIMEOUT_S: Final = 2.0


class Offload(Actor):
    name: ClassVar[str] = "offload"
    Settings = OffloadSettings
    settings: OffloadSettings

    async def setup(self) -> None:
        self._mover = Mover()
        self._pools: dict[str, Pool] = {}
        self._attaching = asyncio.Lock()
        self._copied_pages = self._copied_bytes = 0

    async def teardown(self) -> None:
        if hasattr(self, "_mover"):
            await asyncio.to_thread(self._mover.close)
            for pool in self._pools.values():
                pool.close()

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
        source = MemoryTier(await self._pool(message.source.pool, message.source.epoch))
        target = MemoryTier(await self._pool(message.target.pool, message.target.epoch))
        job = self._mover.submit(
            message.transfer,
            Side(source, message.source, message.source_tail),
            Side(target, message.target, message.target_tail),
        )
        try:
            copied = await asyncio.shield(asyncio.wrap_future(job.done))
        except asyncio.CancelledError:
            job.cancel()
            raise
        self._copied_pages += copied.pages
        self._copied_bytes += copied.bytes
        return copied

    @handles("settle", Settle, to="instance")
    def settle_transfer(self, message: Settle, call: Call) -> Settled:
        return Settled(transfer=message.transfer, running=message.transfer in self._mover.running)

    @listens("event.pool.created", PoolCreated)
    def created(self, message: PoolCreated, call: Call) -> None:
        """Lets the memory of the earlier incarnation go; a copy that still uses it ends as Stale."""
        pool = self._pools.get(message.pool)
        if pool is not None and pool.epoch != message.epoch:
            del self._pools[message.pool]

    async def _pool(self, name: str, epoch: int) -> Pool:
        """The mapped pool of this incarnation; asks the block manager where it is, once. Raises Stale."""
        async with self._attaching:
            pool = self._pools.get(name)
            if pool is None or pool.epoch != epoch:
                attaching = Attach(holder=self.instance, pool=name, fingerprint="")
                description = await self.bus.request(
                    "block_manager.attach", attaching, PoolDescription, timeout_s=ATTACH_TIMEOUT_S
                )
                if description.epoch != epoch:
                    raise Stale(f"pool {name} has been created anew")
                pool = self._pools[name] = attach(description)
            return pool
