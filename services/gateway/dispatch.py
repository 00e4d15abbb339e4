"""Every live request of a gateway: routes workers' tokens to clients and starts the next attempt when one fails."""

from __future__ import annotations

import asyncio

from services.gateway.live import Live
from services.gateway.metrics import Metrics
from services.gateway.placement import NEEDED, Placement, Sends
from services.gateway.recall import Recall, Tasks
from services.gateway.request import Received, Request, State, Verdict
from services.gateway.watch import Watch
from shared import errors, logs
from shared.clock import Clock
from shared.messages import TokenBatch


class Dispatcher:
    """Owns every live request. All methods run on the event loop."""

    def __init__(
        self,
        bus: Sends,
        watch: Watch,
        metrics: Metrics,
        clock: Clock,
        instance: str,
        *,
        queue_size: int,
        max_retries: int,
        patience_s: float = 8.0,
        stall_s: float = 10.0,
    ) -> None:
        self.live: dict[str, Live] = {}  # by the client's id
        self._by_work: dict[str, Live] = {}
        tasks = Tasks()
        self._recall = Recall(bus, tasks, watch.kind_of)
        self.placement = Placement(
            bus,
            watch,
            clock,
            instance,
            tasks,
            self._recall,
            self.live,
            self.fail,
            self.died,
            queue_size=queue_size,
            patience_s=patience_s,
        )
        self._watch = watch
        self._metrics = metrics
        self._clock = clock
        self._max_retries = max_retries
        self._patience_s = patience_s
        self._stall_s = stall_s
        self._short_since: float | None = None  # since when an actor that every request needs has been missing
        self._log = logs.get()
        self._idle = asyncio.Event()
        self._idle.set()
        queue = self.placement.queue
        metrics.waiting.set_function(lambda: len(queue))
        metrics.running.set_function(lambda: len(self.live) - len(queue))

    # --- what the doors call -----------------------------------------------------------------------------------------

    def submit(self, live: Live) -> None:
        """Queues an admitted request. Busy if the queue is full, Conflict if its id is in use."""
        request = live.request
        if request.id in self.live:
            raise errors.Conflict(f"request_id: {request.id} is being served already")
        self.placement.queue.admit(request)
        self.live[request.id] = self._by_work[request.work_id] = live
        self._idle.clear()
        self.placement.wake()

    def cancel(self, request_id: str) -> bool:
        """Ends a request as cancelled, in whatever state; False if it is unknown or over."""
        live = self.live.get(request_id)
        if live is None:
            return False
        live.request.finish_reason = "cancelled"
        self._drop(live)
        self._finish(live)
        return True

    def fail(self, live: Live, error: errors.KvrelayError) -> None:
        """Ends a request with an error and frees what it holds. Nothing happens if it is over."""
        if live.request.state is State.DONE:
            return
        self._drop(live)
        self._finish(live, error)

    async def idle(self) -> None:
        """Returns when no request is live."""
        await self._idle.wait()

    # --- what events call --------------------------------------------------------------------------------------------

    def tokens(self, batch: TokenBatch) -> None:
        """Routes one worker's step."""
        now = self._clock.monotonic()
        for item in batch.items:
            live = self._by_work.get(item.request_id)
            if live is None or live.request.attempt != item.attempt:
                self._metrics.stray.inc()
                self._recall.stray(batch.worker, item, now)
                continue
            before, spoke = live.request.last_token_at, live.request.spoke
            got = live.request.receive(batch.worker, item, now)
            if got.tokens and not spoke:
                self.placement.freed()  # its prompt is done: prefill may take the next one
            self._deliver(live, got, before, now)

    def died(self, instance: str, silent_s: float = 0.0) -> None:
        """Starts the next attempt of everything the dead worker had; it was last heard of `silent_s` ago."""
        kind = self._watch.kind_of(instance)
        self._note_missing(self._clock.monotonic() - silent_s)
        for live in list(self.live.values()):
            if live.request.concerns(instance, kind):
                self._retry(live, errors.Unavailable(f"{instance} is gone"), "worker_lost", silent_s)

    def reconnected(self) -> None:
        """Messages may have been lost, the last ones of a stream among them: nothing running can be trusted."""
        for live in list(self.live.values()):
            if live.request.state is State.RUNNING:
                self._retry(live, errors.Unavailable("the connection to NATS was interrupted"), "fault")

    def sweep(self) -> None:
        """Once a second: requests whose worker hangs, and those that nobody has been able to serve."""
        now = self._clock.monotonic()
        self._note_missing(now)
        for live in list(self.live.values()):
            request = live.request
            if request.state is State.PLACING:
                continue  # the order has a limit of its own
            if self._short_since is not None and now - max(self._short_since, request.progress_at) > self._patience_s:
                missing = " and no ".join(self._watch.missing(NEEDED))
                self.fail(live, errors.Unavailable(f"no {missing} is ready"))
            elif request.state is State.QUEUED and request.exhausted(now, self._patience_s):
                self.fail(live, request.last_error or errors.Unavailable("nobody could serve this request"))
            elif request.state is State.RUNNING:
                quiet = now - request.progress_at
                if self._lost(request, quiet):
                    silent = errors.Unavailable(f"{request.owner} has been silent for {quiet:.0f} s")
                    self._retry(live, silent, "stalled")

    def _note_missing(self, since: float) -> None:
        if not self._watch.missing(NEEDED):
            self._short_since = None
        elif self._short_since is None or since < self._short_since:
            self._short_since = since

    def _lost(self, request: Request, quiet: float) -> bool:
        """Whether a request that has heard nothing for `quiet` seconds will never hear anything.

        A prompt may take minutes among others, so a busy prefill worker is left alone. Two heartbeats tell the rest:
        an owner that is not there, or that has nothing in hand, has lost it. Who decodes speaks at every step, however
        long that takes; after `stall_s`, whoever is further than the step that owes the next token has forgotten it.
        That is two steps, and one more in a hand-over: a step that began before it could not take it in.
        """
        watch, owner = self._watch, request.owner or ""
        if quiet <= watch.silence_s:
            return False
        if not watch.alive(owner) or (watch.idle(owner) and not request.handing_over):
            return True
        if quiet <= self._stall_s:
            return False
        if not watch.healthy(owner):
            return True
        if not request.handing_over:
            return request.spoke and not watch.computing(owner, request.progress_at, 2)
        decoding = (watch.computing(worker, request.progress_at, 3) for worker in watch.instances("decode"))
        return watch.detail(owner, "waiting") == 0 and not any(decoding)

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _deliver(self, live: Live, got: Received, before: float | None, now: float) -> None:
        request, tokens = live.request, got.tokens
        if tokens:
            self._metrics.tokens(request, len(tokens), before, now)
            ends = got.verdict is Verdict.FINISH and request.finish_reason == "stop" and tokens[-1] in live.hidden
            piece = live.text.feed(tokens[:-1] if ends else tokens)
            if piece.stop is not None:
                self._stopped(live, got, piece.text, piece.used, piece.stop)
                return
            live.output.push(piece.text, tokens, got.logprobs)
        match got.verdict:
            case Verdict.FINISH:
                rest = live.text.flush()
                if rest.stop is not None:
                    request.finish_reason, request.stop_reason = "stop", rest.stop
                live.output.push(rest.text, [], None)
                self._finish(live)
            case Verdict.PREEMPTED:
                self._metrics.retried("preempted")
                self._requeue(live)
            case Verdict.FAULT:
                self._retry(live, got.error or errors.Unavailable("the worker gave up"), "fault")
            case Verdict.FAIL:
                self.fail(live, got.error or errors.Internal("the worker failed"))
            case _:
                pass

    def _stopped(self, live: Live, got: Received, text: str, used: int, stop: str) -> None:
        """A stop string: the tokens after the one that completed it never happened."""
        request = live.request
        unused = len(got.tokens) - used
        if unused:
            del request.emitted[-unused:]
        request.finish_reason, request.stop_reason = "stop", stop
        live.output.push(text, got.tokens[:used], got.logprobs[:used] if got.logprobs is not None else None)
        if got.verdict is not Verdict.FINISH:
            self._drop(live)
        self._finish(live)

    def _retry(self, live: Live, error: errors.KvrelayError, reason: str, silent_s: float = 0.0) -> None:
        request = live.request
        self._drop(live)
        since = self._clock.monotonic() - silent_s
        if not request.fault(error, since, limit=self._max_retries, patience_s=self._patience_s):
            self._finish(live, request.last_error)
            return
        self._metrics.retried(reason)
        self._log.warning("request starts again", request=request.id, attempt=request.attempt + 1, why=error.text)
        self._requeue(live)

    def _requeue(self, live: Live) -> None:
        live.request.requeue()
        self.placement.queue.restore(live.request)
        self.placement.wake()

    def _finish(self, live: Live, error: errors.KvrelayError | None = None) -> None:
        request = live.request
        self.placement.queue.remove(request.id)
        self.live.pop(request.id, None)
        self._by_work.pop(request.work_id, None)
        live.close()
        self._metrics.ended(request, error, self._clock.monotonic())
        live.output.end(error)
        if not self.live:
            self._idle.set()

    def _drop(self, live: Live) -> None:
        for worker in live.request.owners():
            self._recall.tell(worker, live.request.work_id, live.request.attempt, live.context)
