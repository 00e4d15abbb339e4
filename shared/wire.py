"""Bytes to messages and back: msgpack, or JSON if the first byte is `{`.

Whatever arrives is untrusted. Length, depth and number of containers are capped before pydantic sees anything: 1 MiB of
empty maps would otherwise become 77 MB and 100 ms of event loop. Everything that is wrong raises `BadRequest` with the
path of the field, never with its value.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

import msgpack
from pydantic import BaseModel, ValidationError

from shared.errors import BadRequest, TooLarge

Encoding = Literal["msgpack", "json"]
M = TypeVar("M", bound=BaseModel)

MAX_MESSAGE_BYTES = 1 << 20
MAX_ARRAY = 131_072
MAX_MAP = 4_096
MAX_CONTAINERS = 16_384
_SHOWN_ERRORS = 3


def encoding_of(body: bytes) -> Encoding:
    """How `body` is written, by its first byte: no msgpack map begins with `{`."""
    return "json" if body[:1] == b"{" else "msgpack"


def encode(message: BaseModel | dict[str, Any], encoding: Encoding = "msgpack") -> bytes:
    """The body of `message`. Fields that are None are left out of msgpack, where no person misses them.

    Raises BadRequest for an integer beyond 64 bits, which msgpack does not have.
    """
    if isinstance(message, dict):
        return json.dumps(message).encode() if encoding == "json" else msgpack.packb(message)
    if encoding == "json":
        return message.model_dump_json().encode()
    try:
        packed: bytes = msgpack.packb(message.model_dump(exclude_none=True))
    except OverflowError:
        raise BadRequest("a number is beyond 64 bits") from None
    return packed


def decode(body: bytes, kind: type[M]) -> M:
    """The message in `body`. Types are strict (no `"1"` for 1), unknown fields are ignored.

    Raises BadRequest with the path of each wrong field, TooLarge past `MAX_MESSAGE_BYTES`.
    """
    if len(body) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        if body[:1] == b"{":
            unpack(body)
            return kind.model_validate_json(body, strict=True)  # the only way that knows of base64
        return kind.model_validate(unpack(body), strict=True)
    except ValidationError as error:
        raise BadRequest(_explain(error)) from None


def unpack(body: bytes) -> dict[str, Any]:
    """The fields of `body`, unvalidated but safe in size and depth. An empty body has none. Raises BadRequest."""
    if not body:
        return {}
    guard = _Guard()
    try:
        if body[:1] == b"{":
            value = json.loads(body, object_pairs_hook=guard.pairs)
        else:
            _walk(body)
            value = msgpack.unpackb(
                body,
                object_pairs_hook=guard.pairs,
                list_hook=guard.items,
                strict_map_key=True,
                max_array_len=min(MAX_ARRAY, len(body)),
                max_map_len=min(MAX_MAP, len(body)),
                max_ext_len=0,
            )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadRequest(f"the body is neither sound msgpack nor JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a map of fields")
    return value


def _walk(body: bytes) -> None:
    """Goes through `body` without building anything, so that lists which only claim to be long cost nothing."""
    walker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES)
    walker.feed(body)
    walker.skip()


def _reason(error: Exception) -> str:
    """A parser's complaint, cut short; parsers may quote the input, which callers know and logs must not hold."""
    return " ".join(str(error).split())[:120] or type(error).__name__


class _Guard:
    """Counts the containers of one body and refuses repeated keys."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_CONTAINERS

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count()
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError("a key appears twice in one map")
        return fields

    def items(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"more than {MAX_CONTAINERS} maps and lists in one body")


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [f"{'.'.join(map(str, problem['loc'])) or 'message'}: {problem['msg']}" for problem in problems]
    more = f" (and {len(shown) - _SHOWN_ERRORS} more)" if len(shown) > _SHOWN_ERRORS else ""
    return "; ".join(shown[:_SHOWN_ERRORS]) + more
