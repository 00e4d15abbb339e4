"""Sequences in, one token of each out per step.

    start: adopt ─▶ Accepted ─▶ steps ─▶ finished, or stopped by an error: last item, release
             └ Busy, Stale: refused, the lease stays where it was

The compute thread steps alone; this side turns its reports into messages: tokens (one batch per gateway), commits of
sealed pages, requests for the next ones. Whatever ends a sequence early (cancel, preemption, a lost lease, a new
incarnation, a silent gateway, drain) takes it out of the batch first; its pages are released when the thread says so.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.decode.batch import Key
from services.decode.engine import DecodeEngine, Report
from services.decode.stream import Stream, sequence_of
from shared import errors, telemetry
from shared.actor import Call, handles, listens
from shared.handles import unpack_u32
from shared.messages import (
    Accepted,
    Adopt,
    CancelWork,
    Empty,
    Heartbeat,
    Lease,
    PoolFreed,
    StartDecode,
    TokenBatch,
    TokenItem,
)
from shared.models.transformer import Transformer
from shared.recent import Recent
from shared.settings import DecodeSettings
from shared.token_items import Preempted, ended
from shared.worker import Worker

ADOPT_S = 4.0
GATEWAY_SILENCE_S = 10.0
SHORT_TOKENS = 32
REMEMBERED = 4096


class DecodeActor(Worker):
    name = "decode"
    Settings = DecodeSettings
    settings: DecodeSettings
    engine: DecodeEngine
    pool_setting = "decode_pool"

    async def setup(self) -> None:
        self._streams: dict[Key, Stream] = {}
        self._by_lease: dict[int, Stream] = {}
        self._admissions: dict[Key, asyncio.Future[None]] = {}
        self._done: Recent[Key] = Recent(REMEMBERED)
        self._gateways: dict[str, float] = {}
        self._outbox: dict[str, list[TokenItem]] = {}
        self._mail = asyncio.Event()
        self._idle = asyncio.Event()
        self._preemptions = 0
        self._seen = (0, 0.0)
        await super().setup()
        self.supervise("sender", self._send)
        self.supervise("gateways", self._watch_gateways)

    def make_engine(self, model: Transformer) -> DecodeEngine:
        config = self.files.config
        longest = min(config.context_length, self.settings.max_model_len or config.context_length)
        size, count = self.layout.block_size, self.settings.max_num_seqs
        return DecodeEngine(model, count, longest, size, self._report, self.keeper.safe, self.scales)

    async def settle(self) -> None:
        """Hands long sequences back at once, so that they go on elsewhere; those with few tokens to go finish."""
        stopping = errors.Unavailable(f"{self.instance} is stopping")
        self._stop([stream for stream in self._streams.values() if self._remaining(stream) > SHORT_TOKENS], stopping)
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s / 3):
                await self._until_idle()
        except TimeoutError:
            self._stop(list(self._streams.values()), stopping)
            await self._until_idle()
        await self.ledger.settled()
        await self._flush()

    def details(self) -> dict[str, Any]:
        engine, now = self.engine, self.clock.monotonic()
        tokens, since = self._seen
        self._seen = (engine.tokens, now)
        return {
            "running": engine.batch.active,
            "waiting": len(self._streams) - engine.batch.active,
            "steps": engine.steps,
            "tokens": engine.tokens,
            "tokens_per_s": round((engine.tokens - tokens) / max(now - since, 1e-3), 1),
            "step_ms": round(engine.busy_s / engine.steps * 1000, 3) if engine.steps else 0.0,
            "preemptions": self._preemptions,
            "starved": self.ledger.starved,
            "leases": len(self.keeper),
            **self.scale_details(),
        }

    # --- messages ---------------------------------------------------------------------------------------------------

    @handles("start", StartDecode)
    async def start_sequence(self, message: StartDecode, call: Call) -> Accepted:
        """Takes a sequence over; a repeat of one that is here or was here is answered like the first."""
        key = (message.work.request_id, message.work.attempt)
        if key in self._admissions:
            await asyncio.shield(self._admissions[key])
        elif key not in self._streams and key not in self._done:
            await self._admit(message, key, call)
        return Accepted(worker=self.instance)

    @handles("cancel", CancelWork, to="instance")
    def cancel(self, message: CancelWork, call: Call) -> Empty:
        """Unknown and finished ones are fine."""
        stream = self._streams.get((message.request_id, message.attempt))
        if stream is not None:
            self._stop([stream], errors.Cancelled("the request was cancelled"))
        return Empty()

    @listens("event.pool.freed", PoolFreed)
    def pool_freed(self, message: PoolFreed, call: Call) -> None:
        """Asks again for what was refused."""
        self.ledger.poke()

    @listens("event.actor.heartbeat", Heartbeat)
    def heard(self, message: Heartbeat, call: Call) -> None:
        """A gateway lives."""
        if message.actor == "gateway":
            self._gateways[message.instance] = self.clock.monotonic()

    # --- admission --------------------------------------------------------------------------------------------------

    async def _admit(self, message: StartDecode, key: Key, call: Call) -> None:
        """Adopts the lease and starts the sequence, or raises and leaves the lease where it was."""
        work, description = message.work, self.require()
        if len(self._streams) >= self.settings.max_num_seqs:
            raise errors.Busy(f"{self.instance} runs {len(self._streams)} sequences already", retry_after_s=0.02)
        others = [stream for stream in self._streams.values() if stream.work.request_id == work.request_id]
        if any(stream.work.attempt > work.attempt for stream in others):
            raise errors.Conflict(f"a later attempt of {work.request_id} is running already")
        self._stop(others, errors.Cancelled("a later attempt has begun"))
        span = self.start_span(telemetry.DECODE_SEQUENCE, call)
        index = len(unpack_u32(work.tokens)) - work.prompt_tokens
        stream = self._streams[key] = Stream(work, index, self.clock.monotonic(), span)
        self._idle.clear()
        admission = self._admissions[key] = asyncio.get_running_loop().create_future()
        try:
            lease = await self._adopt(message, stream)
            if stream.stop is not None:
                raise stream.stop
            if lease.table.epoch != self.require().epoch or description.epoch != lease.table.epoch:
                raise errors.Stale("the pool has just been created anew; recompute")
            vocab_size = self.files.config.vocab_size
            sequence = sequence_of(work, lease, self.layout.block_size, vocab_size, description.max_model_len)
        except BaseException as error:
            self._leave(stream, error if isinstance(error, errors.KvrelayError) else errors.Unavailable("not admitted"))
            self._done.discard(key)
            admission.set_exception(errors.Unavailable("the hand-over failed"))
            admission.exception()  # there may be nobody else to hear it
            raise
        finally:
            del self._admissions[key]
        admission.set_result(None)
        self.compute.submit(self.engine.add, sequence)

    async def _adopt(self, message: StartDecode, stream: Stream) -> Lease:
        sent = self.clock.monotonic()
        adopt = Adopt(lease=message.lease, holder=self.instance, pool=self.settings.decode_pool)
        lease = await self.bus.request("block_manager.adopt", adopt, Lease, timeout_s=ADOPT_S)
        stream.lease = lease.lease
        self._by_lease[lease.lease] = stream
        self.keeper.add(lease.lease, lease.deadline_s, sent)
        return lease

    # --- what the compute thread did ----------------------------------------------------------------------------------

    def _report(self, report: Report) -> None:
        self.compute.post(self._on_report, report)

    def _on_report(self, report: Report) -> None:
        for seal in report.seals:
            stream = self._streams.get(seal.sequence.key)
            if stream is not None and stream.lease is not None and self.settings.enable_prefix_caching:
                page = stream.page_key(seal.tokens, seal.at, self.layout.fingerprint, self.layout.block_size)
                self.ledger.commit(stream.lease, seal.at, page)
        for emission in report.emissions:
            stream = self._streams.get(emission.sequence.key)
            if stream is None:
                continue
            item = stream.item(emission)
            if item is not None:
                self._post(stream, item)
            if emission.finish is not None:
                self._leave(stream, None)
            elif item is None:
                self.log.error("logits are not numbers", request=stream.work.request_id, index=stream.index)
                self._fail(stream, errors.Internal("the model's output is not a number; see the log of the worker"))
        for key in report.hungry:
            stream = self._streams.get(key)
            if stream is not None and stream.lease is not None:
                self.ledger.extend(stream.lease, 1)
        for key, cause in report.gone:
            stream = self._streams.get(key)
            if stream is not None:
                self._fail(stream, stream.stop or cause or errors.Cancelled("the sequence was dropped"))

    def on_grant(self, lease: int, pages: list[tuple[int, int]]) -> None:
        stream = self._by_lease.get(lease)
        if stream is not None:
            self.compute.submit(self.engine.grant, stream.key, pages)

    # --- tokens out ---------------------------------------------------------------------------------------------------

    def _post(self, stream: Stream, item: TokenItem) -> None:
        self._outbox.setdefault(stream.work.gateway, []).append(item)
        self._mail.set()

    async def _send(self) -> None:
        while True:
            await self._mail.wait()
            self._mail.clear()
            await self._flush()

    async def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for gateway, items in outbox.items():
            await self.publish_tokens(gateway, TokenBatch(worker=self.instance, items=items))

    # --- endings ------------------------------------------------------------------------------------------------------

    def _stop(self, streams: list[Stream], error: errors.KvrelayError) -> None:
        """Takes them out of the batch; the end follows when the compute thread says they are out."""
        for stream in streams:
            if stream.stop is None:
                stream.stop = error
                self._preemptions += isinstance(error, Preempted)
                if stream.key not in self._admissions:
                    self.compute.submit(self.engine.drop, stream.key)

    def end_leases(self, leases: list[int], error: errors.KvrelayError) -> None:
        self._stop([stream for lease in leases if (stream := self._by_lease.get(lease)) is not None], error)

    def abandon(self, error: errors.KvrelayError) -> None:
        for stream in list(self._streams.values()):
            if stream.key in self._admissions:
                stream.stop = error
            else:
                self._fail(stream, error)

    def _fail(self, stream: Stream, error: errors.KvrelayError) -> None:
        self._post(stream, ended(stream.work, stream.index, error))
        self._leave(stream, error)

    def _leave(self, stream: Stream, error: errors.KvrelayError | None) -> None:
        del self._streams[stream.key]
        if stream.lease is not None:
            del self._by_lease[stream.lease]
            self.keeper.drop(stream.lease)
            self.ledger.release(stream.lease)
        self._done.add(stream.key)
        if stream.span.is_recording():
            stream.span.set_attributes(stream.attributes(self.instance))
        telemetry.end(stream.span, error)
        if not self._streams:
            self._idle.set()

    async def _watch_gateways(self) -> None:
        """Nobody reads what is computed for a gateway that has been silent: its sequences give their pages back."""
        while True:
            await self.clock.sleep(1.0)
            limit = self.clock.monotonic() - GATEWAY_SILENCE_S
            heard = {name: at for name, at in self._gateways.items() if at >= limit}
            silent = [s for s in self._streams.values() if s.heard < limit and s.work.gateway not in heard]
            self._stop(silent, errors.Cancelled("its gateway is gone"))
            self._gateways = heard

    def _remaining(self, stream: Stream) -> int:
        return stream.work.max_tokens - stream.index

    async def _until_idle(self) -> None:
        while self._streams:
            await self._idle.wait()
