"""The error tree, whole.

    KvrelayError                 code  retry  meaning
    ├── BadRequest               400   no     the message or request is wrong; the text names the field
    │   └── TooLarge             413   no     can never fit: context, pool or message size
    ├── Unauthorized             401   no     NATS refused the credentials or the permission
    ├── NotFound                 404   no     unknown model, request, lease or pool
    ├── Conflict                 409   no     the two sides disagree: fingerprint, layout, duplicate
    ├── Busy                     429   yes    no room now; `retry_after_s` is a hint
    ├── Cancelled                499   no     the caller, or its disappearance, ended the work
    ├── Internal                 500   no     a fault of ours; details are in the log, never in the text
    ├── Unavailable              503   yes    nobody serves the subject, or it is starting or stopping
    │   └── Stale                503   yes    a handle of an earlier tenant or incarnation: recompute
    ├── Timeout                  504   yes    the deadline passed
    └── Misconfigured            -     no     a setting or file of this process; raised at start, never sent

Every error that crosses a process travels as two headers (`Nats-Service-Error-Code`, `Nats-Service-Error`), a type name
and a retry hint; `from_wire` rebuilds the same type. Texts are written for the caller: what is wrong and what to do.
"""

from __future__ import annotations


class KvrelayError(Exception):
    """Base of everything kvrelay raises on purpose. `str(error)` is safe to show to any caller."""

    code = 500
    retryable = False

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.retry_after_s = retry_after_s


class BadRequest(KvrelayError):
    code = 400


class TooLarge(BadRequest):
    code = 413


class Unauthorized(KvrelayError):
    code = 401


class NotFound(KvrelayError):
    code = 404


class Conflict(KvrelayError):
    code = 409


class Busy(KvrelayError):
    code = 429
    retryable = True


class Cancelled(KvrelayError):
    code = 499


class Internal(KvrelayError):
    code = 500


class Unavailable(KvrelayError):
    code = 503
    retryable = True


class Stale(Unavailable):
    pass


class Timeout(KvrelayError):
    code = 504
    retryable = True


class Misconfigured(KvrelayError):
    code = 500


_TYPES: dict[str, type[KvrelayError]] = {
    kind.__name__: kind
    for kind in (
        BadRequest,
        TooLarge,
        Unauthorized,
        NotFound,
        Conflict,
        Busy,
        Cancelled,
        Internal,
        Unavailable,
        Stale,
        Timeout,
    )
}


def from_wire(kind: str, text: str, retry_after_s: float | None = None) -> KvrelayError:
    """Rebuilds the error a peer sent. An unknown `kind` becomes `Internal`, so that a newer peer cannot crash us."""
    return _TYPES.get(kind, Internal)(text, retry_after_s=retry_after_s)
