"""What the block manager is asked and what it answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.handles import BlockTable, Layout, TailHandle
from shared.messages.base import Message, RequestId


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
    block_size: int
    page_bytes: int
    bytes_per_token: float
    table_share: float = Field(description="of block table and ledger in all memory of the pool")
    scale_share: float = Field(description="of scales and padding in a page")
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
