"""KV formats: one file each, found by name. A format says how the K side and the V side of one page are stored.

A file defines `FORMAT`, a `_base.Format`. Nothing here imports torch at module level, so that geometry stays
torch-free.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from kernels.formats._base import Format, Shape, Sizes

__all__ = ["Format", "Shape", "Sizes", "load", "names"]


@cache
def names() -> tuple[str, ...]:
    """Every format there is, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


@cache
def load(name: str) -> Format:
    """The format `name`. Raises ValueError that lists the known ones."""
    if name not in names():
        raise ValueError(f"unknown KV format {name!r}; known: {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    found = module.FORMAT
    assert isinstance(found, Format)
    return found
