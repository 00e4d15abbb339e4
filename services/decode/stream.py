"""What the event loop keeps of a running sequence, and the items it sends. Pure: no torch, no NATS, no asyncio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from opentelemetry.trace import Span

from services.decode.batch import Emission, Key, Sequence
from shared import errors, telemetry
from shared.handles import unpack_u32
from shared.messages import Lease, TokenItem, Work
from shared.prefix import KEY_BYTES, page_keys
from shared.sampling import Sampler


@dataclass(eq=False, slots=True)
class Stream:
    """One attempt of one request in this worker. `index`: tokens emitted over all attempts."""

    work: Work
    index: int
    heard: float
    span: Span
    lease: int | None = None
    stop: errors.KvrelayError | None = None
    parent: bytes | None = None
    emitted: int = 0

    @property
    def key(self) -> Key:
        return self.work.request_id, self.work.attempt

    def item(self, emission: Emission) -> TokenItem | None:
        """The tokens of one step; None if the step had no token for it."""
        choice, finish = emission.choice, emission.finish
        if choice is None:
            return None
        index, self.index = self.index, self.index + 1
        self.emitted += 1
        return TokenItem(
            request_id=self.work.request_id,
            attempt=self.work.attempt,
            index=index,
            tokens=[choice.token],
            logprobs=None if choice.logprob is None else [choice.logprob],
            finish_reason=finish.reason if finish is not None else None,
            stop_reason=finish.stop_reason if finish is not None else None,
            pages=emission.pages if finish is not None else None,
        )

    def page_key(self, tokens: list[int], at: int, fingerprint: str, block_size: int) -> bytes:
        """The key of page `at`, which holds `tokens`: the chain goes on from the pages before it."""
        if self.parent is None and at > 0:
            before = self.work.tokens[: at * block_size * 4]
            self.parent = page_keys(fingerprint, before, block_size, self.work.cache_salt)[-KEY_BYTES:]
        self.parent = page_keys(fingerprint, tokens, block_size, self.work.cache_salt, self.parent)
        return self.parent

    def attributes(self, instance: str) -> dict[str, Any]:
        """Of its span."""
        return {
            telemetry.REQUEST_ID: self.work.request_id,
            telemetry.ATTEMPT: self.work.attempt,
            telemetry.INSTANCE: instance,
            telemetry.TOKENS: self.emitted,
        }


def sequence_of(work: Work, lease: Lease, block_size: int, vocab_size: int, max_model_len: int) -> Sequence:
    """The engine's side of a hand-over: `work.tokens` but the last are in pages and tail, further pages are granted.

    Raises BadRequest if the lease cannot hold them.
    """
    tokens = unpack_u32(work.tokens)
    pages = (len(tokens) - 1) // block_size
    table, generations = unpack_u32(lease.table.indices).astype(np.int32), unpack_u32(lease.table.generations)
    if len(table) < pages:
        raise errors.BadRequest(f"lease {lease.lease} has {len(table)} pages; {len(tokens) - 1} tokens need {pages}")
    if len(tokens) >= max_model_len:
        raise errors.TooLarge(f"{len(tokens)} tokens leave no room: a sequence of this pool has {max_model_len}")
    sequence = Sequence(
        key=(work.request_id, work.attempt),
        sampler=Sampler.of(work, vocab_size=vocab_size, max_model_len=max_model_len),
        tail_slot=lease.tail.slot,
        tail_generation=lease.tail.generation,
        table=table[:pages],
        generations=generations[:pages],
        tail_tokens=tokens[pages * block_size : -1].tolist(),
        next_token=int(tokens[-1]),
    )
    sequence.ready.extend(zip(table[pages:].tolist(), generations[pages:].tolist(), strict=True))
    return sequence
