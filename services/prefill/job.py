"""One attempt of one request in prefill: what is known of it, and the messages made of that. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.prefill.scheduler import Chunk, Key, Prompt
from shared import errors, telemetry
from shared.handles import pack_u32, unpack_u32
from shared.messages import Acquire, Lease, StartDecode, TokenItem, Work
from shared.prefix import KEY_BYTES
from shared.sampling import Choice, Finish, Sampler


@dataclass(eq=False, kw_only=True)
class Job:
    """`keys` name the prompt's whole pages (none without prefix caching); `sampler` counts what has been emitted.

    `stop` says why it must end early; `computing` that the compute thread knows it; `adopted` that decode has it.
    """

    work: Work
    tokens: np.ndarray
    keys: bytes
    sampler: Sampler
    block_size: int
    lease: Lease | None = None
    stop: errors.KvrelayError | None = None
    computing: bool = False
    adopted: bool = False
    compute_s: float = 0.0
    chunks: int = 0

    @property
    def key(self) -> Key:
        return self.work.request_id, self.work.attempt

    @property
    def held(self) -> Lease:
        """Its lease; only to be asked for once there is one."""
        assert self.lease is not None
        return self.lease

    def acquire(self, holder: str, pool: str) -> Acquire:
        """The question for pages and a tail."""
        work = self.work
        return Acquire(
            holder=holder,
            pool=pool,
            request_id=work.request_id,
            attempt=work.attempt,
            keys=self.keys,
            tokens=len(self.tokens),
            priority=work.priority,
            arrival_s=work.arrival_s,
        )

    def prompt(self) -> Prompt:
        """The engine's side of it."""
        lease = self.held
        return Prompt(
            self.key,
            self.tokens,
            unpack_u32(lease.table.indices).astype(np.int32),
            unpack_u32(lease.table.generations),
            lease.tail.slot,
            lease.tail.generation,
            lease.cached_tokens,
            self.block_size,
        )

    def page_keys(self, chunk: Chunk) -> bytes:
        """Keys of the pages a chunk has sealed."""
        return self.keys[chunk.first_page * KEY_BYTES : (chunk.first_page + chunk.pages) * KEY_BYTES]

    def item(self, first: Choice, finish: Finish | None) -> TokenItem:
        """The first token, already counted by the sampler."""
        return TokenItem(
            request_id=self.work.request_id,
            attempt=self.work.attempt,
            index=self.sampler.emitted - 1,
            tokens=[first.token],
            logprobs=None if first.logprob is None else [first.logprob],
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            cached_tokens=self.held.cached_tokens,
            compute_s=self.compute_s,
            pages=-(-len(self.tokens) // self.block_size) if finish else None,
        )

    def hand_over(self, token: int) -> StartDecode:
        """What decode needs to go on after `token`."""
        lease = self.held
        return StartDecode(
            work=self.work.model_copy(update={"tokens": self.work.tokens + pack_u32([token])}),
            lease=lease.lease,
            table=lease.table,
            tail=lease.tail.model_copy(update={"tokens": len(self.tokens) % self.block_size}),
            cached_tokens=lease.cached_tokens,
        )

    def attributes(self, instance: str) -> dict[str, str | int]:
        """Of its span."""
        return {
            telemetry.REQUEST_ID: self.work.request_id,
            telemetry.ATTEMPT: self.work.attempt,
            telemetry.INSTANCE: instance,
            telemetry.CACHED_TOKENS: self.held.cached_tokens,
            telemetry.TOKENS: len(self.tokens) - self.held.cached_tokens,
            telemetry.CHUNKS: self.chunks,
        }
