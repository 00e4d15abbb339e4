"""A request's way from the gateway to the workers, and its tokens' way back."""

from __future__ import annotations

from pydantic import Field

from shared.handles import BlockTable, PackedU32, TailHandle
from shared.messages.base import FinishReason, Message, RequestId
from shared.messages.client import Sampling, TokenLogprob


class Work(Message):
    """What a worker must know of a request. `(request_id, attempt)` names it; older attempts are ignored everywhere."""

    request_id: RequestId
    attempt: int = Field(default=0, ge=0)
    gateway: str = Field(description="instance that listens on gateway.tokens.<instance>")
    tokens: PackedU32 = Field(description="prompt, then what earlier attempts already emitted")
    prompt_tokens: int = Field(ge=1, description="how many of `tokens` are the prompt")
    max_tokens: int = Field(ge=1, description="total to emit, earlier attempts included")
    sampling: Sampling
    eos_token_ids: list[int]
    priority: int = 0
    arrival_s: float = Field(description="wall clock of admission; older is more important within a priority")
    cache_salt: str | None = None


class RunPrefill(Message):
    """`prefill.run`: answered with `Accepted` at once; tokens then flow to `gateway.tokens.<gateway>`."""

    work: Work


class Accepted(Message):
    worker: str


class StartDecode(Message):
    """`decode.start`: hand-over of a sequence whose prompt is computed and whose first new token is sampled.

    `work.tokens` ends with that first token, whose KV is not yet written: table and tail hold `len(tokens) - 1` tokens.
    Answered with `Accepted` after decode has adopted the lease. Delivered twice, it starts once.
    """

    work: Work
    lease: int
    table: BlockTable
    tail: TailHandle
    cached_tokens: int


class CancelWork(Message):
    """`prefill.cancel.<instance>`, `decode.cancel.<instance>`: drop it and free its pages; unknown is fine."""

    request_id: RequestId
    attempt: int


class Preempt(Message):
    """`prefill.preempt.<instance>`, `decode.preempt.<instance>`: give up this lease, older sequences need room."""

    lease: int


class WireError(Message):
    """An error inside a message (errors that answer a request travel in headers)."""

    kind: str
    text: str
    retry_after_s: float | None = None


class TokenItem(Message):
    """New tokens of one request. `index` counts emitted tokens over all attempts, so gaps and repeats show.

    `finish_reason` or `error` ends the attempt. Error kinds `Preempted`, `Stale`, `Unavailable` ask the gateway to
    start the next attempt; others end the request.
    """

    request_id: RequestId
    attempt: int
    index: int = Field(ge=0)
    tokens: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: WireError | None = None
    cached_tokens: int | None = Field(default=None, description="on the first item of an attempt")
    compute_s: float | None = Field(default=None, description="on the first item of an attempt")
    pages: int | None = Field(default=None, description="on the last item")


class TokenBatch(Message):
    """`gateway.tokens.<instance>`: everything one worker's step has for one gateway."""

    worker: str
    items: list[TokenItem]
