"""How a worker says the end of an attempt."""

from __future__ import annotations

from shared.errors import Cancelled, KvrelayError
from shared.messages import TokenItem, WireError, Work


class Preempted(KvrelayError):
    """The sequence gave its pages to an older one; the gateway queues it again at its original place."""

    code = 503
    retryable = True


def ended(work: Work, index: int, error: KvrelayError) -> TokenItem:
    """The last item of an attempt that `error` ended after `index` emitted tokens."""
    if isinstance(error, Cancelled):
        return TokenItem(request_id=work.request_id, attempt=work.attempt, index=index, finish_reason="cancelled")
    wire = WireError(kind=type(error).__name__, text=error.text, retry_after_s=error.retry_after_s)
    return TokenItem(request_id=work.request_id, attempt=work.attempt, index=index, error=wire)
