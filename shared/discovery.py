"""`$SRV.PING`, `$SRV.INFO`, `$SRV.STATS` in the form of the NATS micro protocol, so that `nats micro ls` finds us."""

from __future__ import annotations

import datetime
import json
from typing import Any

from kernels import __version__
from shared.route import Route

_VERBS = ("PING", "INFO", "STATS")


class Discovery:
    """Answers for one actor instance."""

    def __init__(self, name: str, instance: str, namespace: str, routes: list[Route]) -> None:
        self._identity = {"name": name, "id": instance, "version": __version__, "metadata": {"namespace": namespace}}
        self._namespace = namespace
        self._routes = [route for route in routes if not route.event]
        self._started = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")

    def subjects(self) -> list[str]:
        """Every subject on which this instance may be asked."""
        name, instance = self._identity["name"], self._identity["id"]
        return [f"$SRV.{verb}{tail}" for verb in _VERBS for tail in ("", f".{name}", f".{name}.{instance}")]

    def answer(self, subject: str) -> bytes:
        """The JSON body for one of `subjects()`."""
        verb = subject.split(".")[1]
        fields: dict[str, Any] = {"type": f"io.nats.micro.v1.{verb.lower()}_response", **self._identity}
        if verb == "INFO":
            fields["description"] = f"kvrelay {self._identity['name']}"
            fields["endpoints"] = [self._endpoint(route) for route in self._routes]
        elif verb == "STATS":
            fields["started"] = self._started
            fields["endpoints"] = [self._endpoint_stats(route) for route in self._routes]
        return json.dumps(fields).encode()

    def _endpoint(self, route: Route) -> dict[str, Any]:
        return {
            "name": route.verb,
            "subject": f"{self._namespace}.{route.subject}",
            "queue_group": route.queue,
            "metadata": {"message": route.kind.__name__},
        }

    def _endpoint_stats(self, route: Route) -> dict[str, Any]:
        stats = route.stats
        nanoseconds = round(stats.seconds * 1e9)
        return {
            "name": route.verb,
            "subject": f"{self._namespace}.{route.subject}",
            "queue_group": route.queue,
            "num_requests": stats.requests,
            "num_errors": stats.errors,
            "last_error": stats.last_error,
            "processing_time": nanoseconds,
            "average_processing_time": nanoseconds // stats.requests if stats.requests else 0,
        }
