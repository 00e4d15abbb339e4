"""Typed access to a model's metadata: every refusal names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import Misconfigured

_REQUIRED: Any = object()


class Fields:
    """A mapping of metadata with checked look-ups; `null` counts as absent."""

    def __init__(self, origin: str, values: Mapping[str, Any]) -> None:
        self.origin = origin
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int = _REQUIRED, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._bad(key, f"a whole number of at least {minimum}", value)
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A positive finite number."""
        value = self._get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._bad(key, "a positive number", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` positive numbers."""
        value = self._get(key, _REQUIRED)
        numeric = isinstance(value, list) and all(isinstance(item, (int, float)) and item > 0 for item in value)
        if not numeric or len(value) != count:
            raise self._bad(key, f"{count} positive numbers", value)
        return tuple(float(item) for item in value)

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._get(key, default)
        if value is default:
            return default
        if not isinstance(value, str):
            raise self._bad(key, "a text", value)
        return value

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, "true or false", value)
        return value

    def table(self, key: str) -> Fields:
        """A nested mapping; an absent one is empty."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._bad(key, "a map", value)
        return Fields(f"{self.origin}: {key}", value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise Misconfigured(f"{self.origin}: field {key!r} is missing")
            return default
        return value

    def _bad(self, key: str, wanted: str, value: object) -> Misconfigured:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        return Misconfigured(f"{self.origin}: field {key!r} must be {wanted}, not {shown}")
