"""Keys of what happened lately, so that what comes twice is known; the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Recent(Generic[K]):
    """A set of the last `size` keys that were added."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def add(self, key: K) -> None:
        """Makes `key` the newest."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._size:
            self._keys.popitem(last=False)

    def discard(self, key: K) -> None:
        self._keys.pop(key, None)
