"""The block manager: one per node, the only writer of block state. Messages in, messages out; the ledger decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Final

from services.block_manager.copies import Copies, Outcome, time_to_copy, time_to_wait
from services.block_manager.leases import LeaseRecord
from services.block_manager.ledger import Ledger
from services.block_manager.memory import Memory
from services.block_manager.node import Grant, Move, named
from services.block_manager.reminders import Reminders
from services.block_manager.transfers import Transfer
from shared.actor import Actor, Call, handles, listens
from shared.errors import Conflict, KvrelayError, Unavailable
from shared.messages import (
    Acquire,
    ActorExited,
    Adopt,
    Attach,
    Commit,
    Empty,
    Extend,
    Extended,
    Heartbeat,
    Lease,
    Pin,
    Pinned,
    PoolCreated,
    PoolDescription,
    PoolFreed,
    Preempt,
    Release,
    Renew,
    Renewed,
    Stats,
)
from shared.models.files import prepare
from shared.settings import BlockManagerSettings

HOUSEKEEPING_S: Final = 1.0
AUDIT_S: Final = 10.0


class BlockManager(Actor):
    name: ClassVar[str] = "block_manager"
    Settings = BlockManagerSettings
    settings: BlockManagerSettings

    async def setup(self) -> None:
        files = await asyncio.to_thread(prepare, self.settings.model, self.settings.dtype)
        self.memory = await asyncio.to_thread(Memory.create, self.settings, files, self.clock.monotonic)
        self.node = self.memory.node
        self.copies = Copies(self.bus, self.node.transfers, self.clock)
        self._copying: dict[int, asyncio.Task[Any]] = {}  # by transfer
        self._moving: dict[int, asyncio.Task[LeaseRecord | KvrelayError]] = {}  # by lease
        self._reminders = Reminders(self.clock.monotonic)
        self._problems: list[str] = []
        self.supervise("housekeeping", self._keep_house)
        for name, pool in self.memory.pools.items():
            await self.bus.publish("event.pool.created", PoolCreated(pool=name, epoch=pool.epoch))

    async def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()

    def details(self) -> dict[str, Any]:
        if not hasattr(self, "memory"):
            return {}
        ledgers = self.node.ledgers.values()
        return {
            "free": sum(ledger.pages.free for ledger in ledgers),
            "cached": sum(ledger.pages.cached for ledger in ledgers),
            "leases": sum(len(ledger.leases) for ledger in ledgers),
            "transfers": len(self.node.transfers.open),
            "late_transfers": self.node.transfers.late,
            "conserved": not self._problems,
        }

    # --- pools -------------------------------------------------------------------------------------------------------

    @handles("attach", Attach)
    def attach(self, message: Attach, call: Call) -> PoolDescription:
        """An empty fingerprint is a mover's: it copies bytes and need not know what they mean."""
        self.node.ledger(message.pool)
        ours = self.memory.layout.fingerprint
        if message.fingerprint not in ("", ours):
            raise Conflict(
                f"{message.holder} has another model, tokenizer, KV format or block size than pool {message.pool} "
                f"(fingerprint {message.fingerprint} instead of {ours}); start all actors with the same settings"
            )
        return self.memory.describe(message.pool)

    @handles("stats", Empty)
    def stats(self, message: Empty, call: Call) -> Stats:
        return Stats(pools=self.memory.stats())

    @handles("pin", Pin)
    def pin(self, message: Pin, call: Call) -> Pinned:
        return Pinned(pages=self.node.ledger(message.pool).pin(named(message.keys), message.ttl_s))

    # --- leases ------------------------------------------------------------------------------------------------------

    @handles("acquire", Acquire)
    async def acquire(self, message: Acquire, call: Call) -> Lease:
        ledger = self.node.ledger(message.pool)
        if not self.settings.enable_prefix_caching:
            message = message.model_copy(update={"keys": b""})
        keys = named(message.keys)
        await self._arrival(call, lambda: self.node.awaited(message.pool, keys, message.tokens))
        grant = self.node.acquire(message, imports=self.copies.prompt)
        if grant.transfer is not None:
            task = self._copy(grant.transfer, self._import(grant, time_to_copy(call.budget_s)))
            try:
                imported = await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(lambda _: self._disown(message.holder, grant.record))
                raise
            if not imported:  # a miss like any other
                grant = self.node.acquire(message, imports=False)
        ledger.count(grant.record, message.tokens)
        return self._lease(ledger, grant.record)

    @handles("extend", Extend)
    def extend(self, message: Extend, call: Call) -> Extended:
        granted, result = self.node.extend(message.holder, [(item.lease, item.pages) for item in message.items])
        if (victim := result.victim) is not None:
            self._remind()
        return Extended(
            tables=[ledger.table(blocks) for ledger, blocks in granted],
            victim=None if victim is None else victim.lease,
            lost=result.lost,
        )

    def _remind(self) -> None:
        for victim in self.node.victims():
            if self._reminders.due(victim.lease):
                self.spawn("preempt", self.bus.publish(f"decode.preempt.{victim.holder}", Preempt(lease=victim.lease)))

    @handles("commit", Commit)
    def commit(self, message: Commit, call: Call) -> Renewed:
        """A wrong item is refused without keeping the others from being published."""
        lost: list[int] = []
        refused: list[KvrelayError] = []
        for item in message.items if self.settings.enable_prefix_caching else ():
            ledger = self.node.of(item.lease, message.holder)
            try:
                if not ledger.commit(message.holder, item.lease, item.start, named(item.keys)):
                    lost.append(item.lease)
            except KvrelayError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        return Renewed(lost=lost)

    @handles("adopt", Adopt)
    async def adopt(self, message: Adopt, call: Call) -> Lease:
        """Copies pages and tail first if `pool` is another one; until that is verified the lease stays as it was."""
        under_way = self.node.moving.get(message.lease)
        if under_way is None:
            await self._arrival(call, lambda: self.node.awaited_by_move(message.lease, message.pool))
            under_way = self.node.moving.get(message.lease)
        if under_way is None:
            adopted = self.node.adopt(message.lease, message.holder, message.pool)
            if isinstance(adopted, LeaseRecord):
                return self._lease(self.node.of(message.lease), adopted)
            under_way = adopted
            self._moving[message.lease] = self._copy(
                under_way.transfer, self._move(under_way, time_to_copy(call.budget_s))
            )
        elif (under_way.record.holder, under_way.target.pool) != (message.holder, message.pool):
            raise Conflict(f"lease {message.lease} is being adopted by {under_way.record.holder}")
        under_way.waiting += 1
        try:
            record = await asyncio.shield(self._moving[message.lease])
        finally:
            under_way.waiting -= 1
        if isinstance(record, KvrelayError):
            raise record
        return self._lease(under_way.target, record)

    @handles("release", Release)
    def release(self, message: Release, call: Call) -> Empty:
        self.node.release(message.holder, message.leases)
        self._feed()
        return Empty()

    @handles("renew", Renew)
    def renew(self, message: Renew, call: Call) -> Renewed:
        return Renewed(lost=self.node.renew(message.holder, message.leases))

    # --- what happens to others --------------------------------------------------------------------------------------

    @listens("event.actor.exited", ActorExited)
    def exited(self, message: ActorExited, call: Call) -> None:
        ended = [
            record.lease for ledger in self.node.ledgers.values() for record in ledger.holder_gone(message.instance)
        ]
        self.copies.exited(message.instance)
        if ended:
            self.log.info("a holder died; its leases are ended", holder=message.instance, leases=len(ended))
        self._feed()

    @listens("event.actor.heartbeat", Heartbeat)
    def heartbeat(self, message: Heartbeat, call: Call) -> None:
        if message.actor == "offload":
            self.copies.heard(message.instance)

    async def _keep_house(self) -> None:
        audited = self.clock.monotonic()
        while True:
            await self.clock.sleep(HOUSEKEEPING_S)
            for ledger in self.node.ledgers.values():
                for record in ledger.expire():
                    self.log.warning("lease expired", holder=record.holder, request=record.request_id)
            self._remind()
            await self.copies.settle()
            now = self.clock.monotonic()
            if now - audited >= AUDIT_S:
                audited = now
                self._audit()
            self._feed()

    def _audit(self) -> None:
        problems = self.node.audit()
        if problems and problems != self._problems:
            self.log.error("the books are wrong", problems=problems)
        self._problems = problems

    def _feed(self) -> None:
        """Tells those who were told Busy that there is room now."""
        for name, ledger in self.node.ledgers.items():
            if ledger.fed():
                freed = PoolFreed(pool=name, free=ledger.pages.available)
                self.spawn("freed", self.bus.publish("event.pool.freed", freed))

    # --- copies ------------------------------------------------------------------------------------------------------

    async def _arrival(self, call: Call, awaited: Callable[[], Transfer | None]) -> None:
        """Waits while another request is already bringing in what this one needs first; not for ever."""
        until = self.clock.monotonic() + time_to_wait(call.budget_s)
        while (transfer := awaited()) is not None and self.clock.monotonic() < until:
            await asyncio.wait([self._copying[transfer.transfer]], timeout=until - self.clock.monotonic())

    def _copy(self, transfer: Transfer, work: Any) -> asyncio.Task[Any]:
        """Runs `work` to its end even if the caller gives up: only it may close the books of the transfer."""
        task = self.spawn("copy", work)
        self._copying[transfer.transfer] = task
        task.add_done_callback(lambda _: self._copying.pop(transfer.transfer, None))
        return task

    async def _import(self, grant: Grant, timeout_s: float) -> bool:
        transfer = grant.transfer
        assert transfer is not None
        outcome = await self.copies.order(transfer, timeout_s)
        if outcome is Outcome.COPIED:
            return self.node.imported(grant)
        self.node.fail(grant.ledger, grant.record, transfer, proven=outcome is Outcome.FAILED)
        return False

    def _disown(self, holder: str, record: LeaseRecord) -> None:
        """The caller of an acquire is gone before its lease was ready."""
        self.node.release(holder, [record.lease])
        self._feed()

    async def _move(self, move: Move, timeout_s: float) -> LeaseRecord | KvrelayError:
        try:
            self.copies.require()
            outcome = await self.copies.order(move.transfer, timeout_s)
            if outcome is Outcome.COPIED:
                return self.node.moved(move)
            self.node.unmoved(move, proven=outcome is Outcome.FAILED)
            return Unavailable(f"the pages of lease {move.record.lease} could not be copied", retry_after_s=0.1)
        except Unavailable as error:
            if self.node.moving.get(move.record.lease) is move:
                self.node.unmoved(move, proven=True)
            return error
        finally:
            self._moving.pop(move.record.lease, None)

    def _lease(self, ledger: Ledger, record: LeaseRecord) -> Lease:
        return Lease(
            lease=record.lease,
            deadline_s=ledger.lease_s,
            table=ledger.table(record.pages),
            tail=ledger.tail_handle(record.tail),
            cached_tokens=record.cached_tokens,
        )
