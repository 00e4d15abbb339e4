"""Eviction policies, one per file, found by file name."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from services.block_manager.eviction.base import EvictionPolicy
from shared.errors import Misconfigured


def names() -> list[str]:
    return sorted(module.name for module in iter_modules(__path__) if module.name != "base")


def create(name: str, blocks: int) -> EvictionPolicy:
    """The policy of file `<name>.py`, for a pool of `blocks`. Raises Misconfigured for an unknown name."""
    if name not in names():
        raise Misconfigured(f"unknown eviction policy {name!r}; there are: {', '.join(names())}")
    policy: EvictionPolicy = import_module(f"{__name__}.{name}").create(blocks)
    return policy
