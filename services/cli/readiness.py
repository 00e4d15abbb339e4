"""Which processes are ready, from their heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shared.messages import Heartbeat


class Readiness:
    """The newest heartbeat of each instance that is still expected."""

    def __init__(self) -> None:
        self._beats: dict[str, Heartbeat] = {}

    def note(self, beat: Heartbeat) -> bool:
        """Takes a heartbeat; True if its sender became ready with it."""
        before = self._beats.get(beat.instance)
        self._beats[beat.instance] = beat
        return beat.ready and not (before is not None and before.ready)

    def forget(self, instance: str) -> None:
        """The process of this instance has ended."""
        self._beats.pop(instance, None)

    def waiting(self, instances: Mapping[str, str]) -> str:
        """Who is not ready and why, for `instances` as name → instance; empty when all are."""
        parts = []
        for name, instance in instances.items():
            beat = self._beats.get(instance)
            if beat is None:
                parts.append(name)
            elif not beat.ready:
                parts.append(f"{name} ({beat.reason})" if beat.reason else name)
        return ", ".join(parts)
