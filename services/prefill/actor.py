"""Prompts in, sealed pages and a first token out.

    run: acquire ─▶ Accepted ─▶ chunks (commit each) ─▶ first token ─▶ finished: release
          └ Busy: refused, nothing held                              └ else decode.start ─▶ adopted: forget the lease
                                                                           └ error: release, the gateway tries again

Every job is one coroutine from its lease to its end, and ends with exactly one last item or a hand-over. Whatever ends
it early (cancel, preemption, a lost lease, a new incarnation, drain) sets `Job.stop`; pages are released only after the
compute thread has said that it no longer touches them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from opentelemetry.trace import Span

from services.prefill.engine import Computed, Gone, PrefillEngine
from services.prefill.hand_over import HandOver
from services.prefill.job import Job
from services.prefill.scheduler import Key, Prompt
from shared import errors, telemetry
from shared.actor import Call, handles
from shared.handles import unpack_u32
from shared.messages import (
    Accepted,
    CancelWork,
    Empty,
    Lease,
    RunPrefill,
    TokenBatch,
    TokenItem,
    Work,
)
from shared.models.transformer import Transformer
from shared.prefix import page_keys
from shared.recent import Recent
from shared.sampling import Choice, Sampler
from shared.settings import PrefillSettings
from shared.token_items import ended
from shared.worker import Worker

ACQUIRE_S = 3.0
DRAIN_S = 5.0
REMEMBERED = 4096


@dataclass(eq=False, kw_only=True)
class Running(Job):
    """A job with its coroutine's ends: whether it was admitted, and what the compute thread says of it."""

    admitted: asyncio.Future[None]
    events: asyncio.Queue[Computed | Gone] = field(default_factory=asyncio.Queue)


class PrefillActor(Worker):
    name = "prefill"
    Settings = PrefillSettings
    settings: PrefillSettings
    engine: PrefillEngine
    pool_setting = "prefill_pool"

    async def setup(self) -> None:
        self._jobs: dict[Key, Running] = {}
        self._done: Recent[Key] = Recent(REMEMBERED)
        self._idle = asyncio.Event()
        self._tokens = self._chunks = 0
        self._busy_s = 0.0
        self._hand_over = HandOver(self.bus, self.clock)
        await super().setup()

    def make_engine(self, model: Transformer) -> PrefillEngine:
        chunk, longest = self.settings.max_num_batched_tokens, self.settings.max_model_len
        return PrefillEngine(model, chunk, self._report, self.keeper.safe, self.scales, longest)

    async def settle(self) -> None:
        """Prompts are short: those under way are finished and handed over; what takes longer goes back."""
        try:
            async with asyncio.timeout(min(DRAIN_S, self.settings.drain_timeout_s / 2)):
                await self._until_idle()
        except TimeoutError:
            for job in list(self._jobs.values()):
                self._end(job, errors.Unavailable(f"{self.instance} is stopping"))
            await self._until_idle()
        await self.ledger.settled()

    def details(self) -> dict[str, Any]:
        return {
            "running": len(self._jobs) - len(self._hand_over),
            "waiting": len(self._hand_over),
            "chunks": self._chunks,
            "tokens": self._tokens,
            "tokens_per_s": round(self._tokens / self._busy_s, 1) if self._busy_s else 0.0,
            "leases": len(self.keeper),
            **self.scale_details(),
        }

    # --- messages ---------------------------------------------------------------------------------------------------

    @handles("run", RunPrefill)
    async def run(self, message: RunPrefill, call: Call) -> Accepted:
        """Takes a prompt, or says why not; a repeat of one that is here or was here is answered like the first."""
        work = message.work
        key = (work.request_id, work.attempt)
        known = self._jobs.get(key)
        if known is not None:
            await asyncio.shield(known.admitted)
        elif key not in self._done:
            await self._admit(self._accept(work), call)
        return Accepted(worker=self.instance)

    @handles("cancel", CancelWork, to="instance")
    def cancel(self, message: CancelWork, call: Call) -> Empty:
        """Unknown and finished ones are fine."""
        job = self._jobs.get((message.request_id, message.attempt))
        if job is not None:
            self._end(job, errors.Cancelled("the request was cancelled"))
        return Empty()

    # --- admission --------------------------------------------------------------------------------------------------

    def _accept(self, work: Work) -> Running:
        """The job of a request that may be tried; raises what speaks against it."""
        limit = self.require().max_model_len
        for other in [job for job in self._jobs.values() if job.work.request_id == work.request_id]:
            if other.work.attempt > work.attempt:
                raise errors.Conflict(f"attempt {other.work.attempt} of {work.request_id} is running already")
            self._end(other, errors.Cancelled("a later attempt has begun"))
        if len(self._jobs) >= self.settings.max_num_partial_prefills:
            raise errors.Busy(f"{self.instance} already works on {len(self._jobs)} prompts", retry_after_s=0.02)
        tokens, vocab_size = unpack_u32(work.tokens).astype(np.int64), self.files.config.vocab_size
        if not work.prompt_tokens <= len(tokens):
            raise errors.BadRequest(f"prompt_tokens is {work.prompt_tokens} of {len(tokens)} tokens")
        if len(tokens) >= limit:
            raise errors.TooLarge(f"{len(tokens)} tokens leave no room for an answer: prompt and answer have {limit}")
        if int(tokens.max()) >= vocab_size:
            raise errors.BadRequest(f"tokens: ids must be below {vocab_size}")
        keys = b""
        if self.settings.enable_prefix_caching:
            keys = page_keys(self.layout.fingerprint, work.tokens, self.layout.block_size, work.cache_salt)
        return Running(
            work=work,
            tokens=tokens,
            keys=keys,
            sampler=Sampler.of(work, vocab_size=vocab_size, max_model_len=limit),
            block_size=self.layout.block_size,
            admitted=asyncio.get_running_loop().create_future(),
        )

    async def _admit(self, job: Running, call: Call) -> None:
        """Acquires a lease and starts the job, or raises and leaves nothing behind."""
        self._jobs[job.key] = job
        self._idle.clear()
        try:
            prompt = await self._acquire(job)
        except BaseException as error:
            self._leave(job, known=False)
            refused = error if isinstance(error, errors.KvrelayError) else errors.Unavailable("it was not admitted")
            job.admitted.set_exception(refused)
            job.admitted.exception()  # there may be nobody else to hear it
            raise
        job.admitted.set_result(None)
        self.spawn("prefill-job", self._work(job, prompt, call))

    async def _acquire(self, job: Running) -> Prompt:
        ask, sent = job.acquire(self.instance, self.settings.prefill_pool), self.clock.monotonic()
        try:
            lease = job.lease = await self.bus.request("block_manager.acquire", ask, Lease, timeout_s=ACQUIRE_S)
        except BaseException as error:
            if not isinstance(error, errors.KvrelayError) or isinstance(error, (errors.Unavailable, errors.Timeout)):
                self.keeper.doubt()  # the answer may come when nobody waits for it any more
            raise
        self.keeper.add(lease.lease, lease.deadline_s, sent)
        if job.stop is not None:
            raise job.stop
        if lease.table.epoch != self.require().epoch:
            raise errors.Unavailable("the pool has just been created anew", retry_after_s=0.2)
        return job.prompt()

    # --- one job ----------------------------------------------------------------------------------------------------

    async def _work(self, job: Running, prompt: Prompt, call: Call) -> None:
        span = self.start_span(telemetry.PREFILL_COMPUTE, call)
        error: errors.KvrelayError | None = None
        try:
            first = await self._compute(job, prompt, span)
            finish = job.sampler.accept(first.token)
            await self._publish(job, job.item(first, finish))
            if finish is None:
                await self.ledger.settled()
                await self._give_away(job, first.token)
        except errors.KvrelayError as stopped:
            error = stopped
            if isinstance(error, errors.Internal):
                self.log.error("prefill failed", request=job.work.request_id, error=error.text)
        except Exception as fault:
            self.log.error("prefill failed", request=job.work.request_id, exc_info=fault)
            error = errors.Internal("prefill failed; the log of the worker has the details")
        finally:
            self._leave(job, known=True)
            telemetry.end(span, error)
        if error is not None:
            await self._publish(job, ended(job.work, job.sampler.emitted, error))

    async def _compute(self, job: Running, prompt: Prompt, span: Span) -> Choice:
        """The first token. When this returns or raises, the compute thread no longer knows the prompt."""
        if job.stop is not None:
            raise job.stop
        job.computing = True
        self.compute.submit(self.engine.add, prompt, job.sampler)
        while True:
            event = await job.events.get()
            if isinstance(event, Gone):
                job.computing = False
                raise job.stop or event.error or errors.Cancelled("the request was dropped")
            job.compute_s += event.seconds
            job.chunks += 1
            if job.stop is not None:
                continue  # `Gone` is on its way
            if keys := job.page_keys(event.chunk):
                self.ledger.commit(job.held.lease, event.chunk.first_page, keys)
            if span.is_recording() and job.chunks <= telemetry.MAX_EVENTS:
                span.add_event(telemetry.CHUNK, {telemetry.TOKENS: event.chunk.stop - event.chunk.start})
            if event.first is not None:
                job.computing = False
                span.set_attributes(job.attributes(self.instance))
                return event.first

    async def _publish(self, job: Running, item: TokenItem) -> None:
        await self.publish_tokens(job.work.gateway, TokenBatch(worker=self.instance, items=[item]))

    async def _give_away(self, job: Running, token: int) -> None:
        worker = await self._hand_over(job.hand_over(token), lambda: job.stop)
        job.adopted = True
        if isinstance(job.stop, errors.Cancelled):  # too late to stop it here; for other reasons it may as well go on
            cancel = CancelWork(request_id=job.work.request_id, attempt=job.work.attempt)
            await self.bus.publish(f"decode.cancel.{worker}", cancel)

    # --- endings ----------------------------------------------------------------------------------------------------

    def _end(self, job: Running, error: errors.KvrelayError) -> None:
        """Stops the job where it is; its coroutine does the rest."""
        if job.stop is None:
            job.stop = error
            if job.computing:
                self.compute.submit(self.engine.drop, job.key)

    def end_leases(self, leases: list[int], error: errors.KvrelayError) -> None:
        for job in list(self._jobs.values()):
            if job.lease is not None and job.lease.lease in leases:
                self._end(job, error)

    def abandon(self, error: errors.KvrelayError) -> None:
        for job in self._jobs.values():
            job.stop = job.stop or error
            job.events.put_nowait(Gone(job.key))

    def _leave(self, job: Running, *, known: bool) -> None:
        """Lets go of the lease and forgets the job; a `known` one is remembered, so that a repeat does not start it."""
        if job.lease is not None:
            self.keeper.drop(job.lease.lease)
            if not job.adopted:
                self.ledger.release(job.lease.lease)
        self._jobs.pop(job.key, None)
        if known:
            self._done.add(job.key)
        if not self._jobs:
            self._idle.set()

    async def _until_idle(self) -> None:
        while self._jobs:
            await self._idle.wait()

    # --- from the compute thread ------------------------------------------------------------------------------------

    def _report(self, event: Computed | Gone) -> None:
        self.compute.post(self._on_event, event)

    def _on_event(self, event: Computed | Gone) -> None:
        if isinstance(event, Computed):
            self._chunks += 1
            self._tokens += event.chunk.stop - event.chunk.start
            self._busy_s += event.seconds
        job = self._jobs.get(event.key)
        if job is not None:
            job.events.put_nowait(event)
