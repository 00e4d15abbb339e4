"""How the values of settings are written: sizes, lists, formats, folders. Each is checked when it is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from kernels.layout import parse_kv_cache_dtype, parse_skip_layers

MOST_LAYERS = 4096
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _size(value: object) -> object:
    """Bytes of `4096`, `512MiB`, `4G`."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
    if match is None:
        raise ValueError("give bytes, or a size such as 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _kv_format(value: str) -> str:
    parse_kv_cache_dtype(value)
    return value


def _side_format(value: str) -> str:
    parse_kv_cache_dtype("auto", k=value)
    return value


def _layer_names(value: tuple[str, ...]) -> tuple[str, ...]:
    """Checks how they are written; whether the model has as many layers is known later."""
    parse_skip_layers(value, MOST_LAYERS)
    return value


def _home(path: Path) -> Path:
    """`~` at the beginning, which no shell has replaced, is the user's folder."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _list(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


HomePath = Annotated[Path, AfterValidator(_home)]
Bytes = Annotated[int, BeforeValidator(_size), Field(gt=0)]
LayerNames = Annotated[tuple[str, ...], BeforeValidator(_list), AfterValidator(_layer_names)]
KVFormat = Annotated[str, AfterValidator(_kv_format)]
SideFormat = Annotated[str, AfterValidator(_side_format)]
