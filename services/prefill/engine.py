"""Computes prompts chunk by chunk on the compute thread. Knows pages and tensors; nothing of requests or NATS."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kernels.attention import Batch
from kernels.scales import PoolScales
from services.prefill.scheduler import Chunk, Key, Prompt, RoundRobin
from shared.errors import Internal, KvrelayError, Stale
from shared.handles import Layout, TailHandle
from shared.messages import Sampling
from shared.models import ahead_of_time
from shared.models.choice import choose
from shared.models.kv_step import KVStep
from shared.models.runtime import Memory
from shared.models.transformer import Transformer
from shared.sampling import Choice, Sampler


@dataclass(frozen=True, slots=True)
class Computed:
    """One chunk is in the pages. `first` is the sampled token if it was the last chunk."""

    key: Key
    chunk: Chunk
    seconds: float
    first: Choice | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """The engine no longer touches the prompt's pages: it was dropped, or `error` stopped it."""

    key: Key
    error: KvrelayError | None = None


class PrefillEngine:
    """Call everything on the compute thread. `report` receives `Computed` and `Gone`; `safe` says if leases hold."""

    def __init__(
        self,
        model: Transformer,
        max_num_batched_tokens: int,
        report: Callable[[Computed | Gone], None],
        safe: Callable[[], bool],
        scales: PoolScales | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._model = model
        self._scales = scales
        self._longest = min(model.config.context_length, max_model_len or model.config.context_length)
        self._max_tokens = max_num_batched_tokens
        self._report = report
        self._safe = safe
        self._turns = RoundRobin()
        self._samplers: dict[Key, Sampler] = {}
        self._memory: Memory | None = None
        self._finite: torch.Tensor | None = None

    def map(self, memory: Memory | None) -> None:
        """Works on `memory` from now on, or on none until the next call; prompts of the memory before are stale."""
        for prompt in self._turns.all():
            self._stop(prompt.key, Stale("the pool has been created anew; recompute"))
        self._memory = memory

    def add(self, prompt: Prompt, sampler: Sampler) -> None:
        """Starts on a prompt when its turn comes."""
        if self._memory is None:  # its pool has ended since it was admitted
            self._report(Gone(prompt.key, Stale("the pool is being created anew; recompute")))
            return
        self._samplers[prompt.key] = sampler
        self._turns.add(prompt)

    def drop(self, key: Key) -> None:
        """Stops; always answered with `Gone`, even if the prompt was finished or never known."""
        self._stop(key, None)

    def step(self) -> bool:
        """Computes the next chunk. False if there is nothing to do until the next command."""
        if not self._safe():
            return False
        prompt = self._turns.next()
        if prompt is None:
            return False
        chunk = prompt.next_chunk(self._chunk_tokens(prompt))
        started = time.perf_counter()
        try:
            self._check(prompt)
            logits = self._forward(prompt, chunk)
            self._fence()  # what is reported may be published and read by others
            self._check(prompt)
            first = self._first(prompt, logits) if chunk.last else None
            if not self._finite or (chunk.last and first is None):
                raise Internal("the model's output is not a number; see the log of the worker")
        except (Stale, Internal) as error:
            self._stop(prompt.key, error)
            return len(self._turns) > 0
        prompt.advance(chunk)
        if chunk.last:
            self._turns.remove(prompt.key)
            del self._samplers[prompt.key]
        self._report(Computed(prompt.key, chunk, time.perf_counter() - started, first))
        return len(self._turns) > 0

    def warm_up(self, layout: Layout, vocab_size: int) -> None:
        """Runs one prompt through private memory, so that kernels are built and weights are in memory."""
        size = layout.block_size
        self.map(Memory.private(layout, 2, 1, self._model.device))
        tokens = np.arange(2 * size + 1, dtype=np.int64) % vocab_size
        table = np.arange(2, dtype=np.int32)
        sampler = Sampler(
            Sampling(temperature=0.0),
            request_id="warm-up",
            tokens=(),
            prompt_tokens=0,
            eos_token_ids=(),
            vocab_size=vocab_size,
            max_tokens=1,
            max_model_len=1,
        )
        self._run(Prompt(("warm-up", 0), tokens, table, table.astype(np.uint32), 0, 0, 0, size), sampler)
        if ahead_of_time.on_first_use(self._model):
            for pages in ahead_of_time.powers(max(1, self._longest // size - 1)):
                # page 0 over and over, and behind it a page's worth of new tokens, or a single one
                table = np.zeros(pages + 1, np.int32)
                for new in (size, 1):
                    tokens = np.zeros(pages * size + new, np.int64)
                    cached = pages * size
                    self._run(
                        Prompt(("warm-up", 0), tokens, table, table.astype(np.uint32), 0, 0, cached, size), sampler
                    )

    def _run(self, prompt: Prompt, sampler: Sampler) -> None:
        """All of a prompt at once, unseen by anybody."""
        while True:
            chunk = prompt.next_chunk(prompt.block_size)
            logits = self._forward(prompt, chunk)
            prompt.advance(chunk)
            if chunk.last:
                choose(self._model.ops, logits, [sampler])
                return

    def _first(self, prompt: Prompt, logits: torch.Tensor) -> Choice | None:
        return choose(self._model.ops, logits, [self._samplers[prompt.key]])[0]

    def _chunk_tokens(self, prompt: Prompt) -> int:
        return max(prompt.block_size, self._max_tokens - self._max_tokens % prompt.block_size)

    def _stop(self, key: Key, error: KvrelayError | None) -> None:
        self._turns.remove(key)
        self._samplers.pop(key, None)
        self._report(Gone(key, error))

    def _fence(self) -> None:
        assert self._memory is not None, "map() comes first"
        self._memory.fence()

    def _check(self, prompt: Prompt) -> None:
        assert self._memory is not None, "map() comes first"
        if self._memory.pool is not None:
            tail = TailHandle(slot=prompt.tail_slot, generation=prompt.tail_generation)
            self._memory.pool.check(prompt.table, prompt.generations, tail)

    def _forward(self, prompt: Prompt, chunk: Chunk) -> torch.Tensor:
        """Logits float32 [1, vocab] of the prompt's last token, or [0, vocab] before its last chunk."""
        memory, count = self._memory, chunk.stop - chunk.start
        assert memory is not None, "map() comes first"
        pages = chunk.first_page + chunk.pages
        table = torch.from_numpy(prompt.table[:pages])
        batch = Batch(
            tables=table.unsqueeze(0),
            page_counts=torch.tensor([pages], dtype=torch.int32),
            tail_slots=torch.tensor([prompt.tail_slot], dtype=torch.int32),
            tail_lengths=torch.tensor([chunk.tail], dtype=torch.int32),
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            max_pages=pages,
            max_query=max(count, 2),  # one token, too, as part of a prompt: how much was cached changes no answer
        )
        step = KVStep(
            pages=memory.pages,
            tails=memory.tails,
            layout=memory.layout,
            batch=batch,
            append_slots=torch.full((chunk.tail,), prompt.tail_slot, dtype=torch.int32),
            append_positions=torch.arange(chunk.tail, dtype=torch.int32),
            seal_blocks=table[chunk.first_page :],
        )
        if self._scales is not None:
            step.scales = self._scales.tensor
        step.observe = partial(self._observe, chunk.pages * prompt.block_size)
        tokens = torch.from_numpy(prompt.tokens[chunk.start : chunk.stop])
        positions = torch.arange(chunk.start, chunk.stop)
        return self._model.forward(tokens, positions, step, [count - 1] if chunk.last else [])

    def _observe(self, sealed: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sees the keys and values of a chunk, of which the first `sealed` tokens become pages."""
        if self._scales is not None:
            self._scales.count(layer, k[:sealed], v[:sealed])
        if layer == self._model.config.layers - 1:
            # what is no number spreads to the last layer's keys, but quantised pages would hide it from later tokens
            self._finite = torch.isfinite(k).all()
