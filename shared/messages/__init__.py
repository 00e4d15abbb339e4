"""Every message kvrelay's actors exchange; `docs/protocol.md` lists the subject of each.

Bodies are msgpack maps (or JSON, if the first byte is `{`). Unknown fields are ignored, so that old and new actors can
talk; missing or ill-typed ones are refused with the path of the field. Token ids and tables travel as packed
little-endian u32 (`handles.pack_u32`); in JSON, `bytes` are base64.
"""

from __future__ import annotations

from shared.messages.base import Empty, FinishReason, Message, RequestId
from shared.messages.client import (
    Cancel,
    CancelResult,
    ChatMessage,
    Generate,
    Generated,
    ModelCard,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
)
from shared.messages.events import ActorExited, Heartbeat, PoolCreated, PoolFreed
from shared.messages.memory import (
    Acquire,
    Adopt,
    Attach,
    Commit,
    CommitItem,
    Extend,
    Extended,
    ExtendItem,
    Lease,
    Pin,
    Pinned,
    PoolDescription,
    PoolStats,
    Release,
    Renew,
    Renewed,
    Stats,
)
from shared.messages.transfer import Copied, Copy, Settle, Settled
from shared.messages.work import (
    Accepted,
    CancelWork,
    Preempt,
    RunPrefill,
    StartDecode,
    TokenBatch,
    TokenItem,
    WireError,
    Work,
)

__all__ = [
    "Accepted",
    "Acquire",
    "ActorExited",
    "Adopt",
    "Attach",
    "Cancel",
    "CancelResult",
    "CancelWork",
    "ChatMessage",
    "Commit",
    "CommitItem",
    "Copied",
    "Copy",
    "Empty",
    "Extend",
    "ExtendItem",
    "Extended",
    "FinishReason",
    "Generate",
    "Generated",
    "Heartbeat",
    "Lease",
    "Message",
    "ModelCard",
    "Pin",
    "Pinned",
    "PoolCreated",
    "PoolDescription",
    "PoolFreed",
    "PoolStats",
    "Preempt",
    "Release",
    "Renew",
    "Renewed",
    "RequestId",
    "RunPrefill",
    "Sampling",
    "Settle",
    "Settled",
    "StartDecode",
    "Stats",
    "Timings",
    "TokenBatch",
    "TokenItem",
    "TokenLogprob",
    "Usage",
    "WireError",
    "Work",
]
