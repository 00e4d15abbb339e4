"""Which actors are alive, from heartbeats and the supervisor's word. Pure: time comes in as an argument.

An instance is dead when it has been silent for `silence_s`, or at once when the supervisor saw its process end. Names
are never reused, so an exited one stays dead, whatever late heartbeat may still arrive; one that was only silent
(suspended, cut off) is back with its next heartbeat.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from shared.messages import ActorExited, Heartbeat

KINDS = ("gateway", "prefill", "decode", "block_manager", "offload")
STEPS_KEPT = 3


@dataclass(slots=True)
class Seen:
    """The last heartbeat of an instance and when it came; `stepped`: when the last ones came that told of new steps."""

    beat: Heartbeat
    at: float
    stepped: tuple[float, ...] = ()


class Watch:
    """The gateway's picture of the pipeline."""

    def __init__(self, silence_s: float = 3.5, remembered: int = 256) -> None:
        self.silence_s = silence_s
        self._alive: dict[str, Seen] = {}
        self._exited: deque[str] = deque(maxlen=remembered)
        self._kinds: dict[str, str] = {}
        self._swept_at: float | None = None

    def beat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Notes a heartbeat; True if it changed who is ready."""
        if heartbeat.instance in self._exited:
            return False
        before = self._alive.get(heartbeat.instance)
        self._kinds[heartbeat.instance] = heartbeat.actor
        seen = self._alive[heartbeat.instance] = Seen(heartbeat, now)
        if before is not None:
            moved = heartbeat.details.get("steps") != before.beat.details.get("steps")
            seen.stepped = (*before.stepped, now)[-STEPS_KEPT:] if moved else before.stepped
        return (before is not None and self._serves(before)) != self._serves(seen)

    def exited(self, event: ActorExited) -> bool:
        """Notes an exit; True if the instance was not known to be dead yet."""
        if event.instance in self._exited:
            return False
        self._alive.pop(event.instance, None)
        if len(self._exited) == self._exited.maxlen:
            self._kinds.pop(self._exited[0], None)
        self._exited.append(event.instance)
        return True

    def sweep(self, now: float, connected: bool = True) -> list[tuple[str, float]]:
        """Instances that have fallen silent since the last sweep, and for how long. Call it about once a second.

        If this process itself was held up (or cut off from NATS), the silence is ours: everybody gets that time on top.
        """
        ours = now - self._swept_at if self._swept_at is not None else 0.0
        self._swept_at = now
        if not connected or ours > self.silence_s / 2:
            for seen in self._alive.values():
                seen.at += ours
        dead = [(name, now - seen.at) for name, seen in self._alive.items() if now - seen.at > self.silence_s]
        for name, _ in dead:
            del self._alive[name]
        return dead

    def kind_of(self, instance: str) -> str:
        """The actor an instance is or was; by the usual form of its name if it was never heard of."""
        return self._kinds.get(instance) or instance.rpartition("-")[0] or instance

    def alive(self, instance: str) -> bool:
        """Heard of lately."""
        return instance in self._alive

    def gone(self, instance: str) -> bool:
        """Seen to exit; silence alone does not count."""
        return instance in self._exited

    def idle(self, instance: str) -> bool:
        """Its last heartbeat said that it has nothing in hand."""
        return self.detail(instance, "running") == self.detail(instance, "waiting") == 0

    def healthy(self, instance: str) -> bool:
        """Alive and making progress; it may be draining."""
        seen = self._alive.get(instance)
        return seen is not None and seen.beat.ready

    def computing(self, instance: str, since: float, steps: int) -> bool:
        """Ready, in a step, and less than `steps` (at most 3) further than at `since`: who waits may be in that step.

        Of an instance that does not tell its steps nothing is known. One whose step never ends gives itself up.
        """
        seen = self._alive.get(instance)
        if seen is None or not seen.beat.ready:
            return False
        told = seen.beat.details
        if "steps" not in told or not told.get("running"):
            return False
        return sum(at > since for at in seen.stepped) < steps

    def detail(self, instance: str, name: str) -> Any:
        """What its last heartbeat told under `name`; None if there is no such thing."""
        seen = self._alive.get(instance)
        return seen.beat.details.get(name) if seen is not None else None

    def instances(self, kind: str) -> list[str]:
        """Those of `kind` that are alive."""
        return [name for name, seen in self._alive.items() if seen.beat.actor == kind]

    def ready(self, kind: str) -> list[str]:
        """Instances of `kind` that take new work."""
        return [name for name, seen in self._alive.items() if seen.beat.actor == kind and self._serves(seen)]

    def missing(self, kinds: tuple[str, ...] = KINDS) -> list[str]:
        """Kinds of which no instance is ready."""
        return [kind for kind in kinds if not self.ready(kind)]

    def report(self, now: float) -> list[dict[str, Any]]:
        """One map per known instance, for `/health`."""
        return [
            {
                "actor": seen.beat.actor,
                "instance": name,
                "pid": seen.beat.pid,
                "ready": seen.beat.ready,
                "draining": seen.beat.draining,
                "reason": seen.beat.reason,
                "silent_s": round(max(0.0, now - seen.at), 3),
            }
            for name, seen in sorted(self._alive.items())
        ]

    def details(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(actor, instance, details) of everybody, for `/metrics`."""
        return [(seen.beat.actor, name, seen.beat.details) for name, seen in sorted(self._alive.items())]

    @staticmethod
    def _serves(seen: Seen) -> bool:
        return seen.beat.ready and not seen.beat.draining
