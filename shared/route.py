"""What a handler was declared to serve: `@handles` for verbs, `@listens` for events."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from shared import telemetry

To = Literal["any", "instance", "all"]
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_kvrelay_route"


@dataclass
class Stats:
    """Counts of one route since the start, as `$SRV.STATS` shows them."""

    requests: int = 0
    errors: int = 0
    last_error: str = ""
    seconds: float = 0.0

    def served(self, seconds: float) -> None:
        self.requests += 1
        self.seconds += seconds

    def failed(self, kind: str) -> None:
        self.errors += 1
        self.last_error = kind


@dataclass(frozen=True)
class Declared:
    """What the decorator said."""

    verb: str
    kind: type[BaseModel]
    to: To
    root: bool
    event: bool


@dataclass(frozen=True)
class Route:
    """One handler of one actor instance."""

    verb: str
    kind: type[BaseModel]
    to: To
    root: bool
    event: bool
    handler: Callable[..., Any]
    concurrent: bool
    """False: a plain function, called in order of arrival on the event loop."""
    subject: str
    """Without the namespace."""
    queue: str
    span_name: str
    attributes: dict[str, str]
    stats: Stats = field(default_factory=Stats)


def handles(verb: str, kind: type[BaseModel], *, to: To = "any", root: bool = False) -> Callable[[F], F]:
    """Serves `<ns>.<actor>.<verb>`, whose body is a `kind`.

    `to`: `any` one of the instances gets it, `instance` it is addressed (`….<instance>`), `all` every instance gets it.
    `root`: requests enter here: a caller's trace is linked and a new one begins.
    """
    return _mark(Declared(verb, kind, to, root, False))


def listens(event: str, kind: type[BaseModel]) -> Callable[[F], F]:
    """Hears `<ns>.<event>` (`event.pool.freed`) in every instance."""
    return _mark(Declared(event, kind, "all", False, True))


def _mark(declared: Declared) -> Callable[[F], F]:
    def mark(handler: F) -> F:
        setattr(handler, _MARK, declared)
        return handler

    return mark


def routes_of(actor: Any, name: str, instance: str) -> list[Route]:
    """The routes that the class of `actor` declares, bound to it."""
    found = []
    for attribute in dir(type(actor)):
        function = getattr(type(actor), attribute)
        declared = getattr(function, _MARK, None)
        if isinstance(declared, Declared):
            found.append(_bind(declared, getattr(actor, attribute), name, instance))
    return found


def _bind(declared: Declared, handler: Callable[..., Any], name: str, instance: str) -> Route:
    subject = declared.verb if declared.event else f"{name}.{declared.verb}"
    return Route(
        verb=declared.verb,
        kind=declared.kind,
        to=declared.to,
        root=declared.root,
        event=declared.event,
        handler=handler,
        concurrent=inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler),
        subject=f"{subject}.{instance}" if declared.to == "instance" else subject,
        queue=name if declared.to == "any" else "",
        span_name=f"{name}.{declared.verb}",
        attributes={telemetry.ACTOR: name, telemetry.VERB: declared.verb, telemetry.MESSAGING_SYSTEM: "nats"},
    )
