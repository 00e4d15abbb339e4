"""The prefix index: which pages hold the content with this key."""

from __future__ import annotations


class PrefixIndex:
    """Key → blocks. Two requests that compute the same page at the same time both publish theirs, so a key may have
    several blocks; losing one of them must not lose the others."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """How many distinct keys there are."""
        return len(self._first)

    def __contains__(self, key: bytes) -> bool:
        return key in self._first

    def get(self, key: bytes) -> int | None:
        """A block with this content, or None."""
        return self._first.get(key)

    def blocks(self, key: bytes) -> list[int]:
        """All blocks with this content."""
        first = self._first.get(key)
        return [] if first is None else [first, *self._others.get(key, ())]

    def add(self, key: bytes, block: int) -> None:
        if self._first.setdefault(key, block) != block:
            self._others.setdefault(key, []).append(block)

    def remove(self, key: bytes, block: int) -> None:
        """Forgets one block of this key. Raises KeyError or ValueError if it is not there."""
        others = self._others.get(key)
        if self._first[key] != block:
            if others is None:
                raise KeyError(key)
            others.remove(block)
        elif others:
            self._first[key] = others.pop()
        else:
            del self._first[key]
        if others is not None and not others:
            del self._others[key]

    def match(self, keys: list[bytes]) -> list[int]:
        """Blocks of the longest run of `keys`, from the first on, that is here."""
        found: list[int] = []
        get = self._first.get
        for key in keys:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found
