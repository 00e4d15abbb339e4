"""What prefill and decode have in common: a model on a compute thread, a pool, leases, and a ledger to keep right."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import ClassVar, Final, Protocol

from opentelemetry.trace import INVALID_SPAN, Span

from shared import errors, telemetry
from shared.actor import Actor
from shared.call import Call
from shared.compute_environment import usable_cores
from shared.compute_thread import ComputeThread
from shared.handles import Layout
from shared.lease_keeper import LeaseKeeper
from shared.ledger_client import LedgerClient
from shared.messages import Empty, PoolCreated, PoolDescription, Preempt, TokenBatch
from shared.models.files import ModelFiles, prepare
from shared.models.runtime import Memory, load, pool_scales
from shared.models.transformer import Transformer
from shared.pool import Pool, device_of
from shared.pool.layout import cache_for
from shared.pool_client import PoolClient
from shared.route import handles, listens
from shared.run import give_up
from shared.settings import WorkerSettings
from shared.token_items import Preempted

OUTAGE_S: Final = 5.0
"""After so long without a connection a gateway has given the worker up, and token items are dropped."""


class Engine(Protocol):
    """What runs on the compute thread."""

    def step(self) -> bool: ...

    def map(self, memory: Memory | None) -> None: ...

    def warm_up(self, layout: Layout, vocab_size: int) -> None: ...


class Worker(Actor):
    """Ready once the model is loaded, its kernels have run once and the pool is attached."""

    settings: WorkerSettings
    pool_setting: ClassVar[str]
    engine: Engine
    _loaded = False

    @abstractmethod
    def make_engine(self, model: Transformer) -> Engine:
        """Called on the compute thread."""

    @abstractmethod
    def end_leases(self, leases: list[int], error: errors.KvrelayError) -> None:
        """Stop what runs under these leases; the pages are not ours any more, or must not be soon."""

    @abstractmethod
    def abandon(self, error: errors.KvrelayError) -> None:
        """The compute thread has died: end everything with `error`, without waiting for it."""

    def on_grant(self, lease: int, pages: list[tuple[int, int]]) -> None:
        """Pages that were asked for with `ledger.extend`, as (index, generation)."""

    async def setup(self) -> None:
        settings = self.settings
        self.threads = settings.threads or usable_cores()
        self.keeper = LeaseKeeper(self.bus, self.instance, self._on_lost, self._on_renewed, self.clock.monotonic)
        self.ledger = LedgerClient(
            self.bus,
            self.instance,
            on_grant=lambda lease, table: self.on_grant(lease, [(h.index, h.generation) for h in table.handles()]),
            on_victim=lambda lease: self.end_leases([lease], Preempted("older sequences need the pages")),
            on_lost=self._on_lost,
        )
        self.files: ModelFiles = await asyncio.to_thread(prepare, settings.model, settings.dtype)
        self.layout, scale_file = cache_for(self.files, settings)
        self.scales = None if scale_file is None else pool_scales(scale_file, self.layout)
        self.compute = ComputeThread(f"{self.name}-compute", self._step, self._on_crash)
        self.compute.start(asyncio.get_running_loop())
        self.engine = await self.compute.call(self._load)
        self._loaded = True
        self.supervise("progress", self._watch_progress)
        self.pool = PoolClient(
            self.bus,
            self.instance,
            getattr(settings, self.pool_setting),
            self.layout,
            self._on_mapped,
            self._on_ended,
            self.clock,
        )
        await self.pool.attach()
        self.supervise("leases", self.keeper.run)
        self.supervise("ledger", self.ledger.run)
        self.supervise("pool", self.pool.run)

    async def teardown(self) -> None:
        if hasattr(self, "compute"):
            await self.compute.stop()
        if hasattr(self, "pool"):
            self.pool.close()

    def unready(self) -> str:
        return "" if self.pool.description is not None else "waiting for the block manager"

    def require(self) -> PoolDescription:
        """The pool to work in; raises Unavailable while there is none, at stop, and after a failure."""
        if self.draining or self.failure is not None:
            raise errors.Unavailable(f"{self.instance} is stopping")
        return self.pool.require()

    def scale_details(self) -> dict[str, float]:
        """For heartbeats: how much saturated under scales that were calibrated elsewhere; nothing without such."""
        return {} if self.scales is None else {"clipped_fraction": self.scales.clipped_fraction}

    def start_span(self, name: str, call: Call) -> Span:
        """A span below the request's own, for work that outlives its message; none outside of a trace."""
        context = telemetry.request_context(call.context)
        return telemetry.tracer().start_span(name, context) if telemetry.has_parent(context) else INVALID_SPAN

    @handles("preempt", Preempt, to="instance")
    def preempt(self, message: Preempt, call: Call) -> Empty:
        """Older sequences need the pages of this lease."""
        self.end_leases([message.lease], Preempted("older sequences need the pages"))
        return Empty()

    @listens("event.pool.created", PoolCreated)
    def pool_created(self, message: PoolCreated, call: Call) -> None:
        """Attaches to the new incarnation."""
        self.pool.created(message)

    async def publish_tokens(self, gateway: str, batch: TokenBatch) -> None:
        """Waits for a connection that is down: late items do no harm, but a last word that is never said does.

        A batch that is lost all the same shows as a gap, or as silence, to the gateway, which starts the next attempt.
        """
        try:
            if not self.bus.up:
                await self.bus.connection.wait_up(OUTAGE_S)
            await self.bus.publish(f"gateway.tokens.{gateway}", batch)
        except errors.KvrelayError as error:
            self.log.warning("token items were lost", gateway=gateway, items=len(batch.items), error=error.text)

    def _step(self) -> bool:
        return self._loaded and self.engine.step()

    async def _watch_progress(self) -> None:
        """A compute thread that hangs does not hinder heartbeats: without this, requests would wait for it for ever."""
        limit_s = self.settings.compute_timeout_s
        stack = await self.compute.stalled(limit_s, self.clock)
        give_up("the compute thread hangs", limit_s=limit_s, setting="compute_timeout_s", stack=stack)

    def _load(self) -> Engine:
        device = device_of(getattr(self.settings, self.pool_setting))
        model = load(self.files, self.files.dtype, self.settings.kernels, self.threads, device)
        engine = self.make_engine(model)
        engine.warm_up(self.layout, self.files.config.vocab_size)
        if self.scales is not None:
            self.scales.reset()
        return engine

    async def _on_mapped(self, pool: Pool, description: PoolDescription) -> None:
        await self.compute.call(lambda: self.engine.map(Memory.of(pool, description.layout)))

    async def _on_ended(self) -> None:
        await self.compute.call(self.engine.map, None)

    def _on_lost(self, leases: list[int]) -> None:
        self.end_leases(leases, errors.Stale("the lease ran out; recompute"))

    def _on_renewed(self) -> None:
        self.compute.submit(_nothing)  # wakes an engine that stood still because its leases were not surely valid

    def _on_crash(self, error: BaseException) -> None:
        self.log.error("the compute thread failed", exc_info=error)
        self.failure = error
        self.abandon(errors.Unavailable(f"{self.instance} failed"))
        self.failed.set()


def _nothing() -> None:
    pass
