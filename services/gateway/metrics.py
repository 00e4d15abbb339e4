"""Prometheus metrics of the gateway and, through heartbeats, of every actor. `docs/protocol.md` lists them.

kvrelay_requests_total{outcome}             counter    ended requests: stop, length, cancelled or the error's type
kvrelay_requests_waiting                    gauge      in the admission queue
kvrelay_requests_running                    gauge      placed on a worker
kvrelay_retries_total{reason}               counter    later attempts: preempted, fault, worker_lost, stalled
kvrelay_prompt_tokens_total                 counter    prompt tokens of requests that produced a token
kvrelay_cached_tokens_total                 counter    those of them found in the prefix cache
kvrelay_generation_tokens_total             counter    tokens emitted
kvrelay_request_queue_time_seconds          histogram  arrival to first placement
kvrelay_time_to_first_token_seconds         histogram  arrival to first token
kvrelay_time_to_first_token_overhead_seconds histogram the part of it that is neither queueing nor model time
kvrelay_inter_token_latency_seconds         histogram  between batches of tokens of one request
kvrelay_e2e_request_latency_seconds         histogram  arrival to end
kvrelay_stray_messages_total                counter    token items for attempts that are over
kvrelay_actors_ready{actor}                 gauge      instances that take work
kvrelay_actor_detail{actor,instance,name}   gauge      numbers that actors report in their heartbeats
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.request import Request
from services.gateway.watch import KINDS, Watch
from shared.errors import Cancelled, KvrelayError

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, watch: Watch) -> None:
        self.registry = CollectorRegistry()
        at = self.registry
        self._requests = Counter("kvrelay_requests", "Ended requests", ["outcome"], registry=at)
        self.waiting = Gauge("kvrelay_requests_waiting", "Requests in the admission queue", registry=at)
        self.running = Gauge("kvrelay_requests_running", "Requests placed on a worker", registry=at)
        self._retries = Counter("kvrelay_retries", "Attempts after the first", ["reason"], registry=at)
        self._prompt = Counter("kvrelay_prompt_tokens", "Prompt tokens", registry=at)
        self._cached = Counter("kvrelay_cached_tokens", "Prompt tokens found in the prefix cache", registry=at)
        self._generated = Counter("kvrelay_generation_tokens", "Tokens emitted", registry=at)
        self._queue = Histogram("kvrelay_request_queue_time_seconds", "Queueing", buckets=_SHORT, registry=at)
        self._ttft = Histogram("kvrelay_time_to_first_token_seconds", "TTFT", buckets=_SHORT, registry=at)
        self._overhead = Histogram(
            "kvrelay_time_to_first_token_overhead_seconds", "TTFT less model time", buckets=_SHORT, registry=at
        )
        self._itl = Histogram("kvrelay_inter_token_latency_seconds", "ITL", buckets=_SHORT, registry=at)
        self._e2e = Histogram("kvrelay_e2e_request_latency_seconds", "Whole requests", buckets=_LONG, registry=at)
        self.stray = Counter("kvrelay_stray_messages", "Token items for attempts that are over", registry=at)
        at.register(_Actors(watch))

    def tokens(self, request: Request, count: int, before: float | None, now: float) -> None:
        """Counts `count` new tokens of a request whose last ones came at `before` (None: these are the first)."""
        self._generated.inc(count)
        if before is not None:
            self._itl.observe(now - before)
            return
        timings = request.timings(now)
        self._queue.observe(timings.queued_s)
        self._ttft.observe(timings.ttft_s)
        self._overhead.observe(max(0.0, timings.ttft_s - timings.queued_s - timings.compute_s))
        self._prompt.inc(len(request.prompt))
        self._cached.inc(request.cached_tokens or 0)

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def ended(self, request: Request, error: KvrelayError | None, now: float) -> None:
        self._requests.labels(str(request.finish_reason) if error is None else _outcome(error)).inc()
        self._e2e.observe(now - request.started)

    def refused(self, error: KvrelayError) -> None:
        """A request that was never admitted."""
        self._requests.labels(_outcome(error)).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _outcome(error: KvrelayError) -> str:
    """Whether a client asked for the end of its request or vanished is one outcome."""
    return "cancelled" if isinstance(error, Cancelled) else type(error).__name__


class _Actors(Collector):
    """What the last heartbeats said, read when Prometheus asks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily("kvrelay_actors_ready", "Instances that take work", labels=["actor"])
        for kind in KINDS:
            ready.add_metric([kind], len(self._watch.ready(kind)))
        yield ready
        detail = GaugeMetricFamily(
            "kvrelay_actor_detail", "Numbers in heartbeats", labels=["actor", "instance", "name"]
        )
        for actor, instance, details in self._watch.details():
            for name, value in _numbers(details):
                detail.add_metric([actor, instance, name], value)
        yield detail


def _numbers(details: dict[str, object], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in details.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
