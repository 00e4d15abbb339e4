"""The life of one request as a state machine. Pure: no NATS, no asyncio, time comes in as an argument.

    QUEUED ──place──▶ PLACING ──accepted / first tokens──▶ RUNNING ──finish──▶ DONE
      ▲                  │ refused                           │ fault, preemption
      └──────────────────┴───────────────────────────────────┘ (attempt + 1 unless nothing can have been started)

Whatever happens between, the client sees the emitted tokens once and in order: an item counts only if it belongs to the
current attempt and starts where the emitted tokens end; what overlaps is cut, and a gap starts the next attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from shared import errors
from shared.handles import pack_u32
from shared.messages import FinishReason, Generate, Timings, TokenItem, TokenLogprob, Usage, Work

RETRIED = ("Stale", "Unavailable", "Timeout")


class State(Enum):
    QUEUED = auto()
    PLACING = auto()
    RUNNING = auto()
    DONE = auto()


class Verdict(Enum):
    """What the caller of `receive` has to do."""

    IGNORE = auto()  # an old attempt, a repeat, or after the end
    EMIT = auto()  # pass the tokens on
    FINISH = auto()  # pass the tokens on, then end the stream
    PREEMPTED = auto()  # pass the tokens on, then queue again
    FAULT = auto()  # pass the tokens on, then `fault` decides
    FAIL = auto()  # pass the tokens on, then end with `error`


@dataclass(slots=True, frozen=True)
class Received:
    """New tokens of the request and the verdict."""

    verdict: Verdict
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    error: errors.KvrelayError | None = None


@dataclass(slots=True)
class Request:
    """One admitted request. `prompt` are its token ids; `arrival_s` is wall clock, every other time is monotonic.

    Clients choose `id` and may use it again when this request is over; workers know it by `work_id`, which never
    returns, so that nothing of one request is ever taken for another's.
    """

    id: str
    work_id: str
    generate: Generate
    prompt: list[int]
    max_tokens: int
    eos_token_ids: list[int]
    arrival_s: float
    started: float
    deadline: float | None = None
    state: State = State.QUEUED
    attempt: int = 0
    emitted: list[int] = field(default_factory=list)
    owner: str | None = None  # the instance that is known to work on the current attempt
    previous: str | None = None  # the one that handed it over, within the attempt
    actors: list[str] = field(default_factory=list)
    faults: int = 0
    trouble_since: float | None = None  # first fault since the last token
    last_error: errors.KvrelayError | None = None
    cached_tokens: int | None = None
    compute_s: float = 0.0
    pages: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    placed_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    progress_at: float = 0.0

    spoke: bool = False  # the current attempt has emitted tokens

    @property
    def priority(self) -> int:
        return self.generate.priority

    @property
    def handing_over(self) -> bool:
        """Prefill has sampled the first token of this attempt and no decode worker has spoken yet."""
        return self.state is State.RUNNING and self.owner is not None and self.previous is None and self.spoke

    def work(self, gateway: str) -> Work:
        """The order for the current attempt: prompt and everything emitted so far."""
        return Work(
            request_id=self.work_id,
            attempt=self.attempt,
            gateway=gateway,
            tokens=pack_u32(self.prompt + self.emitted),
            prompt_tokens=len(self.prompt),
            max_tokens=self.max_tokens,
            sampling=self.generate.sampling,
            eos_token_ids=self.eos_token_ids,
            priority=self.priority,
            arrival_s=self.arrival_s,
            cache_salt=self.generate.cache_salt,
        )

    def place(self) -> None:
        """Leaves the queue; the order is about to be sent."""
        self.state = State.PLACING
        self.owner = self.previous = None
        self.spoke = False

    def accepted(self, worker: str, attempt: int, now: float) -> bool:
        """Notes who took the order. False: the answer came too late and that worker must be told to drop it."""
        if attempt != self.attempt or self.state not in (State.PLACING, State.RUNNING):
            return False
        self._run(now)
        if self.owner is None:
            self._own(worker)
        return True

    def refused(self, maybe_started: bool) -> None:
        """Goes back to the queue because nobody took the order. If somebody may have, that attempt is void.

        If somebody had no room just now, a request that has lost nothing yet only waits its turn: trouble is over.
        """
        if not maybe_started and not self.faults:
            self.trouble_since = None
        self.requeue(void=maybe_started)

    def requeue(self, void: bool = True) -> None:
        self.state = State.QUEUED
        self.owner = self.previous = None
        self.spoke = False
        if void:
            self.attempt += 1

    def receive(self, worker: str, item: TokenItem, now: float) -> Received:
        """Takes an item of a worker's batch; see the head of this file for what counts."""
        if item.attempt != self.attempt or self.state not in (State.PLACING, State.RUNNING):
            return Received(Verdict.IGNORE)
        self._run(now)
        known = len(self.emitted)
        if item.index > known:
            lost = f"tokens {known} to {item.index - 1} of the stream were lost on the way"
            return Received(Verdict.FAULT, error=errors.Unavailable(lost))
        self._own(worker)
        repeated = known - item.index
        tokens = item.tokens[repeated:][: self.max_tokens - known]
        logprobs = item.logprobs[repeated : repeated + len(tokens)] if item.logprobs is not None else None
        if tokens:
            self._progress(tokens, now)
        self._account(item)
        if item.error is not None:
            error = errors.from_wire(item.error.kind, item.error.text, item.error.retry_after_s)
            if item.error.kind == "Preempted":
                return Received(Verdict.PREEMPTED, tokens, logprobs)
            verdict = Verdict.FAULT if item.error.kind in RETRIED else Verdict.FAIL
            return Received(verdict, tokens, logprobs, error)
        if item.finish_reason == "cancelled":  # we did not ask for it, or this request would be over
            return Received(Verdict.FAULT, tokens, logprobs, errors.Unavailable(f"{worker} gave the request up"))
        if item.finish_reason is not None:
            self.finish_reason, self.stop_reason = item.finish_reason, item.stop_reason
            return Received(Verdict.FINISH, tokens, logprobs)
        return Received(Verdict.EMIT if tokens else Verdict.IGNORE, tokens, logprobs)

    def concerns(self, instance: str, kind: str) -> bool:
        """Whether the death of `instance` may have taken this attempt with it.

        During the hand-over the new owner is not known: any decode worker may be it, and so may the old one still.
        """
        if self.state is not State.RUNNING:
            return False
        return self.owner == instance or (kind == "decode" and self.handing_over)

    def fault(self, error: errors.KvrelayError, now: float, *, limit: int, patience_s: float) -> bool:
        """Notes a fault of the pipeline; True if the request may try again, False if `last_error` ends it."""
        self.faults += 1
        self.trouble(error, now)
        return self.faults <= limit and not self.exhausted(now, patience_s)

    def trouble(self, error: errors.KvrelayError, now: float) -> None:
        """Notes that nobody could serve it just now."""
        self.last_error = error
        if self.trouble_since is None:
            self.trouble_since = now

    def exhausted(self, now: float, patience_s: float) -> bool:
        """Whether it has been without a token for too long since a fault."""
        return self.trouble_since is not None and now - self.trouble_since > patience_s

    def owners(self) -> list[str]:
        """Instances that may still hold something for the current attempt."""
        return [name for name in (self.previous, self.owner) if name is not None]

    def end(self) -> None:
        """Whatever comes later is ignored."""
        self.state = State.DONE

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt), completion_tokens=len(self.emitted), cached_tokens=self.cached_tokens or 0
        )

    def timings(self, now: float) -> Timings:
        """Seconds so far; `tokens_per_s` is the pace after the first token, 0 if there were fewer than two."""
        first, last = self.first_token_at, self.last_token_at
        pace = 0.0
        if first is not None and last is not None and last > first:
            pace = (len(self.emitted) - 1) / (last - first)
        return Timings(
            queued_s=(self.placed_at or now) - self.started,
            ttft_s=first - self.started if first is not None else 0.0,
            compute_s=self.compute_s,
            total_s=now - self.started,
            tokens_per_s=pace,
        )

    def _run(self, now: float) -> None:
        if self.state is State.PLACING:
            self.state = State.RUNNING
            self.progress_at = now
            if self.placed_at is None:
                self.placed_at = now

    def _own(self, worker: str) -> None:
        if worker != self.owner:
            self.previous, self.owner = self.owner, worker
        if not self.actors or self.actors[-1] != worker:
            self.actors.append(worker)

    def _progress(self, tokens: list[int], now: float) -> None:
        self.emitted += tokens
        self.spoke = True
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = self.progress_at = now
        self.trouble_since = None

    def _account(self, item: TokenItem) -> None:
        if item.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = min(item.cached_tokens, len(self.prompt))
        if item.compute_s is not None and not self.compute_s:
            self.compute_s = item.compute_s
        if item.pages is not None:
            self.pages = item.pages
