"""NATS headers kvrelay reads and writes, and how an error travels in them.

traceparent                the span this message was sent from (W3C)
kvrelay-request            span context of the request's root span, so that late spans can hang directly below it
kvrelay-timeout-ms         how long the caller will wait, relative: clocks of two machines are never compared
kvrelay-keepalive          on a request: this caller ignores keepalives while it waits; on a message: it is one
kvrelay-sequence           0, 1, 2 … on the messages of a stream, its end included: a lost one shows
Nats-Service-Error-Code    an HTTP-like number                       ┐
Nats-Service-Error         text fit for any caller                   │ together: this message is an error,
kvrelay-error              type name in shared.errors                │ and it ends the exchange
kvrelay-retry-after-ms     hint of a retryable error                 ┘
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import Internal, KvrelayError, from_wire

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
REQUEST_SPAN = "kvrelay-request"
TIMEOUT_MS = "kvrelay-timeout-ms"
KEEPALIVE = "kvrelay-keepalive"
SEQUENCE = "kvrelay-sequence"
ERROR_CODE = "Nats-Service-Error-Code"
ERROR_TEXT = "Nats-Service-Error"
ERROR_KIND = "kvrelay-error"
RETRY_AFTER_MS = "kvrelay-retry-after-ms"
STATUS = "Status"
NO_RESPONDERS = "503"

MAX_ERROR_TEXT = 1024
_KIND_OF_CODE = {
    "400": "BadRequest", "401": "Unauthorized", "404": "NotFound", "409": "Conflict", "413": "TooLarge",
    "429": "Busy", "499": "Cancelled", "503": "Unavailable", "504": "Timeout",
}  # fmt: skip


def get(headers: Mapping[str, str] | None, name: str) -> str | None:
    """The value of a header whatever its case: NATS keeps case, HTTP-minded clients do not."""
    if not headers:
        return None
    value = headers.get(name)
    if value is not None:
        return value
    wanted = name.lower()
    for key, value in headers.items():
        if key.lower() == wanted:
            return value
    return None


def timeout_s(headers: Mapping[str, str] | None) -> float | None:
    """The caller's budget in seconds; None if it gave none or nonsense."""
    text = get(headers, TIMEOUT_MS)
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 12:
        return None
    return int(text) / 1000


def from_error(error: KvrelayError) -> dict[str, str]:
    """The headers that carry `error`."""
    headers = {
        ERROR_CODE: str(error.code),
        ERROR_TEXT: error.text[:MAX_ERROR_TEXT],
        ERROR_KIND: type(error).__name__,
    }
    if error.retry_after_s is not None:
        headers[RETRY_AFTER_MS] = str(max(0, round(error.retry_after_s * 1000)))
    return headers


def to_error(headers: Mapping[str, str] | None) -> KvrelayError | None:
    """The error a message carries, or None. An error of a foreign NATS service is told by its code alone."""
    code = get(headers, ERROR_CODE)
    if code is None:
        return None
    kind = get(headers, ERROR_KIND) or _KIND_OF_CODE.get(code, Internal.__name__)
    retry_after = get(headers, RETRY_AFTER_MS)
    seconds = int(retry_after) / 1000 if retry_after and retry_after.isdigit() else None
    return from_wire(kind, get(headers, ERROR_TEXT) or f"error {code}", seconds)
