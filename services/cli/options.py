"""Command-line options made from the settings classes: a setting that exists is a flag, with the help it has there."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared import settings
from shared.settings import CommonSettings

KINDS: dict[str, type[CommonSettings]] = {
    kind.section: kind
    for kind in (
        settings.GatewaySettings,
        settings.PrefillSettings,
        settings.DecodeSettings,
        settings.BlockManagerSettings,
        settings.OffloadSettings,
    )
}
"""The settings of each actor, by its name."""

NOT_SETTINGS = frozenset({"KVRELAY_CACHE_DIR", "KVRELAY_CONFIG", "KVRELAY_CPU_ISA", "KVRELAY_SHM_DIR"})
"""Variables that are read where they are needed."""
CLOSE = 0.9
NOT_FLAGS = frozenset({"instance", "nats_user", "nats_password"})
"""Set per process, or secret: command lines are visible to everybody on the machine."""


def with_settings(kinds: Iterable[type[CommonSettings]], command: Callable[..., None]) -> Callable[..., None]:
    """`command(settings: dict, …)` as a function Typer can read: every setting of `kinds` becomes an option.

    What the user did not give is None in the dictionary.
    """
    fields: dict[str, FieldInfo] = {}
    for kind in kinds:
        fields |= {name: field for name, field in kind.model_fields.items() if name not in NOT_FLAGS}
    own = {name: one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != "flags"}
    given = {name: _parameter(name, field) for name, field in fields.items() if name not in own}

    def run(**values: Any) -> None:
        command({name: values[name] for name in given}, **{name: values[name] for name in own})

    run.__doc__ = command.__doc__
    parameters = [*own.values(), *given.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def environment(flags: Mapping[str, Any]) -> dict[str, str]:
    """The given ones among `flags` as the variables that carry them to another process."""
    return {f"KVRELAY_{name.upper()}": _text(value) for name, value in flags.items() if value is not None}


def misspelt(variables: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Variables that look like a setting and are none, with the one that may be meant.

    Others of our prefix are left alone: a cluster gives its containers `KVRELAY_PORT` and more for a service `kvrelay`.
    """
    names = {f"KVRELAY_{name.upper()}" for kind in KINDS.values() for name in kind.model_fields}
    for variable in variables:
        if variable.startswith("KVRELAY_") and variable not in names and variable not in NOT_SETTINGS:
            for meant in difflib.get_close_matches(variable, names, 1, CLOSE):
                yield variable, meant


def known(kind: type[CommonSettings], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `flags` that `kind` has."""
    return {name: value for name, value in flags.items() if name in kind.model_fields}


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    default = field.get_default(call_default_factory=False)
    shown = "" if default in (None, PydanticUndefined, ()) else f"(default {_text(default)})"
    flag = f"--{name.replace('_', '-')}"
    declared = typer.Option(
        f"{flag}/--no-{flag[2:]}" if isinstance(default, bool) else flag,
        help=f"{field.description or ''} {shown}".strip(),
    )
    annotation: Any = Annotated[Optional[_flag_type(field)], declared]  # noqa: UP045  # the type is known at run time
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(field: FieldInfo) -> Any:
    """The type Typer checks; what has a notation of its own (sizes, lists) stays text for the settings to read."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    parsed_later = any(type(extra).__name__ == "BeforeValidator" for extra in (*field.metadata, *get_args(annotation)))
    if get_origin(annotation) is Literal:
        return annotation
    if parsed_later or annotation not in (bool, int, float, Path):
        return str
    return annotation


def _text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value)
