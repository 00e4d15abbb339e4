"""Every message kvrelay's actors exchange; `docs/protocol.md` lists the subject of each.

Bodies are msgpack maps (or JSON, if the first byte is `{`). Unknown fields are ignored, so that old and new actors can
talk; missing or ill-typed ones are refused with the path of the field. Token ids and tables travel as packed
little-endian u32 (`handles.pack_u32`); in JSON, `bytes` are base64.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from shared.handles import BlockTable, Layout, PackedU32, TailHandle, as_tuple

RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
TokenKey = Annotated[
    int,
    BeforeValidator(lambda key: int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key),
    PlainSerializer(str),  # keys of maps travel as text: the decoder takes no others
]
FinishReason = Literal["stop", "length", "cancelled"]


class Message(BaseModel):
    """Base of all bodies: immutable, lenient towards unknown fields, strict about types (no `"1"` for 1)."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")


class Empty(Message):
    """A body without fields."""


# --- gateway: what clients send and receive -------------------------------------------------------------------------


class Sampling(Message):
    """How the next token is chosen. `temperature` 0 is greedy; ties go to the lowest token id."""

    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, description="0: off")
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=1024
    )
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    logprobs: int | None = Field(default=None, ge=0, le=20, description="how many alternatives; 0: the chosen token only")


class ChatMessage(Message):
    role: str = Field(min_length=1, max_length=32)
    content: str


class Generate(Message):
    """`gateway.generate`: exactly one of `prompt`, `messages`, `token_ids`."""

    request_id: RequestId | None = None
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1, description="default: what is left of the context")
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list, max_length=16)
    sampling: Sampling = Sampling()
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="lower is served first")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)


class Usage(Message):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TokenLogprob(Message):
    token_id: int
    logprob: float
    top: list[Annotated[tuple[int, float], BeforeValidator(as_tuple)]] = Field(default_factory=list)


class Timings(Message):
    """Seconds. `compute_s` is the model time of prefill up to the first token; the rest of TTFT is control plane."""

    queued_s: float = 0.0
    ttft_s: float = 0.0
    compute_s: float = 0.0
    total_s: float = 0.0
    tokens_per_s: float = 0.0


class Generated(Message):
    """One event of a stream, or the only answer. `text` and `token_ids` are deltas in a stream and whole otherwise.

    The last event of a stream carries `finish_reason`, `usage`, `timings`, `actors` and no text of its own.
    """

    request_id: str
    trace_id: str
    text: str = ""
    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = Field(default=None, description="the stop string or token id that ended it")
    usage: Usage | None = None
    timings: Timings | None = None
    actors: list[str] | None = Field(default=None, description="instances that handled it, in order")
    pages: int | None = Field(default=None, description="pages of the sequence at its end")
    attempts: int | None = None


class Cancel(Message):
    """`gateway.cancel`. Unknown and finished ids are answered `CancelResult(found=False)`; cancelling twice is harmless."""

    request_id: RequestId


class CancelResult(Message):
    found: bool


class ModelCard(Message):
    """`gateway.model`: what this pipeline serves."""

    name: str
    architecture: str
    context_length: int
    vocab_size: int
    dtype: str
    k_format: str
    v_format: str


# --- gateway ↔ workers -----------------------------------------------------------------------------------------------


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


# --- block manager ---------------------------------------------------------------------------------------------------


class Attach(Message):
    """`block_manager.attach`: a worker asks where a pool is; a fingerprint that differs is refused (Conflict)."""

    holder: str
    pool: str
    fingerprint: str


class PoolDescription(Message):
    """How to map a pool. `path` names shared memory of this node; `epoch` is the incarnation it must show."""

    pool: str
    kind: Literal["shm", "cuda_ipc"]
    path: str
    epoch: int
    blocks: int
    tails: int
    layout: Layout
    max_model_len: int = Field(description="longest sequence the pool can always finish, in tokens")


class Acquire(Message):
    """`block_manager.acquire`: hits, grants and a tail for one prompt, all or nothing.

    `keys`: 16 bytes per full page of the prompt, in order. At least one token is always left to compute.
    """

    holder: str
    pool: str
    request_id: RequestId
    attempt: int = 0
    keys: bytes
    tokens: int = Field(ge=1)
    priority: int = 0
    arrival_s: float = 0.0


class Lease(Message):
    """A lease and everything held under it. The first `cached_tokens` tokens are already in the pages."""

    lease: int
    deadline_s: float = Field(description="seconds from now until it expires unless renewed")
    table: BlockTable
    tail: TailHandle
    cached_tokens: int = 0


class ExtendItem(Message):
    lease: int
    pages: int = Field(ge=1)


class Extend(Message):
    """`block_manager.extend`: more pages for running sequences, in order, each all or nothing."""

    holder: str
    items: list[ExtendItem]


class Extended(Message):
    """One table per item; an empty one means no room. `victim` is then the lease whose holder should preempt it."""

    tables: list[BlockTable]
    victim: int | None = None
    lost: list[int] = Field(default_factory=list, description="leases that do not exist or are held by somebody else")


class CommitItem(Message):
    """Pages `start … start + len(keys)/16` of the lease's table hold their final bytes and may be shared."""

    lease: int
    start: int = Field(ge=0)
    keys: bytes


class Commit(Message):
    """`block_manager.commit`: publish pages to the prefix index."""

    holder: str
    items: list[CommitItem]


class Adopt(Message):
    """`block_manager.adopt`: `holder` takes over the lease; pages and tail are copied if `pool` is another one."""

    lease: int
    holder: str
    pool: str


class Release(Message):
    """`block_manager.release`: give everything back. Unknown leases are ignored and counted."""

    holder: str
    leases: list[int]


class Renew(Message):
    """`block_manager.renew`: the leases this holder still uses; those it does not name run out."""

    holder: str
    leases: list[int]


class Renewed(Message):
    lost: list[int] = Field(default_factory=list, description="no longer exist, or are held by somebody else")


class Pin(Message):
    """`block_manager.pin`: keep cached pages from eviction for `ttl_s` seconds; 0 unpins. Answers `Pinned`."""

    pool: str
    keys: bytes
    ttl_s: float = Field(ge=0, le=30 * 86_400)


class Pinned(Message):
    pages: int


class PoolStats(Message):
    """`free + filling + active + cached + quarantined == total`, always."""

    total: int
    free: int
    filling: int
    active: int
    cached: int
    quarantined: int
    pinned: int
    page_bytes: int
    bytes_total: int
    bytes_used: int
    tails_total: int
    tails_free: int
    leases: int
    epoch: int
    k_format: str
    v_format: str
    hit_tokens: int = Field(description="prompt tokens found in the cache, counted once at admission")
    prompt_tokens: int
    evictions: int
    expired_leases: int
    unknown_leases: int


class Stats(Message):
    """Answer of `block_manager.stats`."""

    pools: dict[str, PoolStats]


class Preempt(Message):
    """`decode.preempt.<instance>`: give up this lease so that older sequences can go on."""

    lease: int


# --- offload ---------------------------------------------------------------------------------------------------------


class Copy(Message):
    """`offload.copy`: bytes of whole pages (and of a tail) from one pool to another. Answers `Copied`.

    The mover checks epoch and generations of both sides before and after, and answers Stale if one changed.
    """

    transfer: int
    source: BlockTable
    target: BlockTable
    source_tail: TailHandle | None = None
    target_tail: TailHandle | None = None


class Copied(Message):
    transfer: int
    pages: int
    bytes: int
    seconds: float


class Settle(Message):
    """`offload.settle.<instance>`: the answer to a copy never came; are its bytes still being written? Answers `Settled`."""

    transfer: int


class Settled(Message):
    transfer: int
    running: bool


# --- everyone --------------------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """`event.actor.heartbeat`: `ready` is progress, not an open port; `details` are numbers for `kvrelay stats`."""

    actor: str
    instance: str
    pid: int
    ready: bool
    draining: bool = False
    reason: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class ActorExited(Message):
    """`event.actor.exited`: the supervisor saw this process end; nobody needs to wait for missing heartbeats."""

    actor: str
    instance: str
    pid: int
    code: int


class PoolFreed(Message):
    """`event.pool.freed`: room appeared after somebody was told Busy."""

    pool: str
    free: int


class PoolCreated(Message):
    """`event.pool.created`: a new incarnation; every older handle of this pool is stale."""

    pool: str
    epoch: int
