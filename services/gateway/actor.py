"""The gateway actor: messages in, messages out. The life of a request is in `dispatch.py` and `request.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

from services.gateway.dispatch import Dispatcher
from services.gateway.http.app import Door
from services.gateway.http.server import HttpServer
from services.gateway.intake import Intake
from services.gateway.metrics import Metrics
from services.gateway.service import Service
from services.gateway.watch import Watch
from shared.actor import Actor
from shared.bus import Bus
from shared.call import Call
from shared.clock import SYSTEM, Clock
from shared.errors import KvrelayError, Unavailable
from shared.messages import (
    ActorExited,
    Attach,
    Cancel,
    CancelResult,
    Empty,
    Generate,
    Generated,
    Heartbeat,
    ModelCard,
    PoolCreated,
    PoolDescription,
    PoolFreed,
    TokenBatch,
)
from shared.models.files import ModelFiles, prepare
from shared.models.tokenizer import Detokenizer, Tokenizer
from shared.pool.layout import layout_for
from shared.route import handles, listens
from shared.settings import CommonSettings, GatewaySettings

SWEEP_S = 1.0
ATTACH_RETRY_S = 0.25
ATTACH_TIMEOUT_S = 2.0
OTHERS_FIRST_S = 0.1
MAX_RETRIES = 8


class Gateway(Actor):
    """Two doors, one queue, and the watch over the workers."""

    name: ClassVar[str] = "gateway"
    Settings: ClassVar[type[CommonSettings]] = GatewaySettings

    def __init__(self, bus: Bus, settings: GatewaySettings, clock: Clock = SYSTEM) -> None:
        super().__init__(bus, settings, clock)
        self.settings: GatewaySettings = settings
        self._watch = Watch()
        self._metrics = Metrics(self._watch)
        self._dispatcher = Dispatcher(
            bus,
            self._watch,
            self._metrics,
            clock,
            self.instance,
            queue_size=settings.queue_size,
            max_retries=MAX_RETRIES,
        )
        self._files: ModelFiles | None = None
        self._tokenizer: Tokenizer | None = None
        self._card: ModelCard | None = None
        self._undescribed = "the block manager has not described the pools yet"
        self._describe = asyncio.Event()
        self._reconnects = 0
        self._service = Service(self._dispatcher, self._metrics, clock, self._detokenizer, lambda: self.draining)
        door = Door(self._service, self._watch, self._metrics, clock, self, self.card)
        self._http = HttpServer(door.app(), settings.http_host, settings.http_port)

    # --- life --------------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """The port is bound first, so that a taken one is told at once and `/health` answers 503 meanwhile."""
        self._http.bind()
        self.supervise("http", self._http.serve)
        self._files = await asyncio.to_thread(prepare, self.settings.model, self.settings.dtype)
        self._tokenizer = await asyncio.to_thread(Tokenizer.load, self._files)
        self.supervise("describe", self._describe_pools)
        self.supervise("place", self._dispatcher.placement.run)
        self.supervise("watch", self._look_after)

    async def settle(self) -> None:
        """HTTP requests live on without a handler."""
        await self._dispatcher.idle()

    async def teardown(self) -> None:
        self._service.close()
        await self._http.stop()

    def unready(self) -> str:
        return self._undescribed

    def details(self) -> dict[str, Any]:
        queue, live = self._dispatcher.placement.queue, self._dispatcher.live
        return {"http_port": self._http.port, "waiting": len(queue), "running": len(live) - len(queue)}

    # --- clients -----------------------------------------------------------------------------------------------------

    @handles("generate", Generate, root=True)
    async def generate(self, message: Generate, call: Call) -> Generated | AsyncIterator[Generated]:
        """One answer, or a stream of deltas ended by the event with `finish_reason`."""
        live = await self._service.open(message, call.context, call.budget_s)
        return self._service.events(live) if message.stream else await self._service.whole(live)

    @handles("cancel", Cancel, to="all")
    async def cancel(self, message: Cancel, call: Call) -> CancelResult:
        """All gateways hear it. Those who do not know the request let the one that does answer first."""
        found = self._dispatcher.cancel(message.request_id)
        if not found and len(self._watch.ready(self.name)) > 1:
            await self.clock.sleep(OTHERS_FIRST_S)
        return CancelResult(found=found)

    @handles("model", Empty)
    def model(self, message: Empty, call: Call) -> ModelCard:
        return self.card()

    def card(self) -> ModelCard:
        """What is served. Unavailable until it is known."""
        if self._card is None:
            raise Unavailable(f"the gateway is starting: {self._undescribed}", retry_after_s=1.0)
        return self._card

    def token_bytes(self, token: int) -> bytes:
        """The text of one token, for log-probabilities."""
        return self._loaded().token_bytes(token)

    # --- workers -----------------------------------------------------------------------------------------------------

    @handles("tokens", TokenBatch, to="instance")
    def tokens(self, message: TokenBatch, call: Call) -> None:
        self._dispatcher.tokens(message)

    @listens("event.actor.heartbeat", Heartbeat)
    def heartbeat(self, message: Heartbeat, call: Call) -> None:
        if self._watch.beat(message, self.clock.monotonic()):
            self._dispatcher.placement.wake()

    @listens("event.actor.exited", ActorExited)
    def exited(self, message: ActorExited, call: Call) -> None:
        if self._watch.exited(message):
            self._dispatcher.died(message.instance)

    @listens("event.pool.freed", PoolFreed)
    def freed(self, message: PoolFreed, call: Call) -> None:
        self._dispatcher.placement.freed()

    @listens("event.pool.created", PoolCreated)
    def created(self, message: PoolCreated, call: Call) -> None:
        self._describe.set()

    # --- background --------------------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        """Finds the dead, the hanging and the forgotten, once a second."""
        while True:
            await self.clock.sleep(SWEEP_S)
            for instance, silent_s in self._watch.sweep(self.clock.monotonic(), self.bus.up):
                self.log.warning("an actor is silent", instance=instance, seconds=round(silent_s, 1))
                self._dispatcher.died(instance, silent_s)
            reconnects = self.bus.connection.client.stats["reconnects"]
            if self.bus.up and reconnects != self._reconnects:
                self._reconnects = reconnects
                self._dispatcher.reconnected()
            self._dispatcher.sweep()

    async def _describe_pools(self) -> None:
        """Learns from the block manager how long a sequence may be; again whenever a pool is made anew."""
        if self._files is None:
            raise RuntimeError("setup prepares the model first")
        layout = layout_for(self._files, self.settings)
        pools = sorted({self.settings.prefill_pool, self.settings.decode_pool})
        orders = [Attach(holder=self.instance, pool=pool, fingerprint=layout.fingerprint) for pool in pools]
        while True:
            self._describe.clear()
            try:
                found = [await self._attach(order) for order in orders]
            except KvrelayError as error:
                if self._card is None:
                    self._undescribed = error.text
                await self.clock.sleep(ATTACH_RETRY_S)
                continue
            self._open(self._files, min(pool.max_model_len for pool in found), found[0])
            await self.announce()  # ready now, not at the next heartbeat
            await self._describe.wait()

    async def _attach(self, order: Attach) -> PoolDescription:
        return await self.bus.request("block_manager.attach", order, PoolDescription, timeout_s=ATTACH_TIMEOUT_S)

    def _open(self, files: ModelFiles, pool_len: int, pool: PoolDescription) -> None:
        config, tokenizer = files.config, self._loaded()
        max_model_len = min(pool_len, config.context_length, self.settings.max_model_len or config.context_length)
        name = Path(self.settings.model).name  # a path of this machine is nobody else's business
        self._card = ModelCard(
            name=name,
            architecture=config.architecture,
            context_length=max_model_len,
            vocab_size=config.vocab_size,
            dtype=files.dtype,
            k_format=pool.layout.k_format,
            v_format=pool.layout.v_format,
        )
        self._service.intake = Intake(
            tokenizer,
            names=list(dict.fromkeys((name, self.settings.model, config.name))),
            vocab_size=config.vocab_size,
            eos_token_ids=list(files.eos_token_ids),
            max_model_len=max_model_len,
        )
        self._undescribed = ""

    def _loaded(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unavailable("the gateway is starting: its tokenizer is not loaded yet", retry_after_s=1.0)
        return self._tokenizer

    def _detokenizer(self, before: list[int]) -> Detokenizer:
        return Detokenizer(self._loaded(), prompt_ids=before)
