"""One step of the continuous batch after the other, on the compute thread. Waits for nothing but commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from kernels.attention import Batch, SharedPrefix
from kernels.scales import PoolScales
from kernels.shared_prefix import share
from services.decode.batch import DecodeBatch, Emission, Key, Seal, Sequence
from shared.errors import KvrelayError, Stale
from shared.handles import Layout
from shared.messages import Sampling
from shared.models import ahead_of_time
from shared.models.choice import choose
from shared.models.kv_step import KVStep
from shared.models.runtime import Memory
from shared.models.transformer import Transformer
from shared.sampling import Sampler


@dataclass(slots=True)
class Report:
    """What happened since the last report. The engine no longer touches the pages of finished and `gone` sequences."""

    emissions: list[Emission] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    hungry: list[Key] = field(default_factory=list)
    gone: list[tuple[Key, KvrelayError | None]] = field(default_factory=list)


class _Views(NamedTuple):
    """Tensors over the first n rows of the batch's arrays; made once per n."""

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: list[int]
    step: KVStep


class DecodeEngine:
    """Call everything on the compute thread. `report` receives a `Report`; `safe` says whether all leases hold.

    A step is reported when the next one is about to compute: the event loop then works beside it. Told at once, it
    would want the interpreter just when this thread needs it to begin.
    """

    def __init__(
        self,
        model: Transformer,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        report: Callable[[Report], None],
        safe: Callable[[], bool],
        scales: PoolScales | None = None,
    ) -> None:
        self._model = model
        self._scales = scales
        self._scale_tensor = None if scales is None else scales.tensor
        self._tell = report
        self._untold: Report | None = None
        self._safe = safe
        self._sequences: dict[Key, Sequence] = {}
        self.batch = DecodeBatch(max_num_seqs, max_model_len // block_size + 1, block_size)
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._append_positions = np.zeros(max_num_seqs, np.int32)
        self._views: dict[int, _Views] = {}
        layers = range(model.config.layers)
        # the CPU backend finds what is shared by itself
        self._shares = model.ops.name == "triton" and not all(model.config.window(layer) for layer in layers)
        self._shared: SharedPrefix | None = None
        self._shared_of = (-1, 0)
        self._memory: Memory | None = None
        self.steps = 0
        self.tokens = 0
        self.busy_s = 0.0

    def map(self, memory: Memory | None) -> None:
        """Works on `memory` from now on, or on none until the next call; sequences of the memory before are stale."""
        self._memory = memory
        self._views.clear()
        if self._sequences:
            self._report(Report(gone=self._forget(self.batch.rows[:], Stale("the pool has been created anew"))))
        if memory is not None and memory.pool is not None and ahead_of_time.on_first_use(self._model):
            rows, width = self.batch.tables.shape
            ahead_of_time.run_decode_steps(self._model, memory, rows, width, self._scale_tensor, self._shares)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in; it is part of the next step."""
        if self._memory is None:  # its pool has ended since it was admitted
            self._report(Report(gone=[(sequence.key, Stale("the pool is being created anew; recompute"))]))
            return
        self._sequences[sequence.key] = sequence
        self.batch.add(sequence)
        self._report_hungry()

    def grant(self, key: Key, pages: Seq[tuple[int, int]]) -> None:
        """Pages (index, generation) for a sequence; nothing happens if it has gone meanwhile."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        seal = self.batch.grant(sequence, pages)
        if seal is not None:
            self._report(Report(seals=self._seal([seal])))
        self._report_hungry()

    def drop(self, key: Key) -> None:
        """Takes a sequence out; always answered with `gone`, even if it was finished or never known."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._forget([sequence], None)
        self._report(Report(gone=[(key, None)]))

    def step(self) -> bool:
        """One step of all active sequences. False if there is nothing to do until the next command."""
        batch = self.batch
        if not batch.active or not self._safe():
            self._catch_up()
            return False
        if self._drop_stale():
            return batch.active > 0
        started = time.perf_counter()
        count = batch.begin()
        logits = self._forward(count)
        self._fence()  # until then pages are being read
        if self._drop_stale(begun=True):
            return batch.active > 0
        samplers = [sequence.sampler for sequence in batch.rows[:count]]
        emissions, seals = batch.end(choose(self._model.ops, logits, samplers))
        if seals:
            seals = self._seal(seals)
        for emission in emissions:
            if emission.sequence.row < 0:
                del self._sequences[emission.sequence.key]
        self._untold = Report(emissions, seals, [sequence.key for sequence in batch.hungry()])
        self.steps += 1
        self.tokens += count
        self.busy_s += time.perf_counter() - started
        if not batch.active:
            self._catch_up()
        return batch.active > 0

    def warm_up(self, layout: Layout, vocab_size: int) -> None:
        """Runs a sequence across a page border in private memory, so that kernels are built and weights in memory."""
        size = layout.block_size
        self.map(Memory.private(layout, 2, 1, self._model.device))
        tokens = np.arange(size, dtype=np.int64) % vocab_size
        sampler = Sampler(
            Sampling(temperature=0.0, ignore_eos=True),
            request_id="warm-up",
            tokens=tokens,
            prompt_tokens=size - 1,
            eos_token_ids=(),
            vocab_size=vocab_size,
            max_tokens=4,
            max_model_len=2 * size,
        )
        nothing = np.zeros(0, np.int32)
        sequence = Sequence(("warm-up", 0), sampler, 0, 0, nothing, nothing, tokens[:-1].tolist(), int(tokens[-1]))
        self.batch.add(sequence)
        self.batch.grant(sequence, [(0, 0)])
        while self.batch.active:
            logits = self._forward(self.batch.begin())
            _, seals = self.batch.end(choose(self._model.ops, logits, [sampler]))
            self._seal(seals)

    def _forward(self, count: int) -> torch.Tensor:
        """Logits float32 [count, vocab] of the active rows, whose tail lengths already count the new token."""
        try:
            views = self._views_of(count)
            return self._model.forward(views.tokens, views.positions, views.step, views.rows, meanwhile=self._catch_up)
        finally:
            self._catch_up()  # whatever failed, the step before did not

    def _views_of(self, count: int) -> _Views:
        """The tensors of the active rows, as they are now."""
        batch = self.batch
        views = self._views.get(count) or self._make_views(count)
        np.subtract(batch.tail_lengths[:count], 1, out=self._append_positions[:count])
        longest, shared = batch.max_pages(), self._shared_by(count)
        if longest != views.step.batch.max_pages or shared is not views.step.batch.shared:
            views.step.batch = replace(self._attention_batch(count, longest), shared=shared)
        return views

    def _make_views(self, count: int) -> _Views:
        assert self._memory is not None, "map() comes first"
        batch = self.batch
        step = KVStep(
            pages=self._memory.pages,
            tails=self._memory.tails,
            layout=self._memory.layout,
            batch=self._attention_batch(count, batch.max_pages()),
            append_slots=torch.from_numpy(batch.tail_slots[:count]),
            append_positions=torch.from_numpy(self._append_positions[:count]),
            scales=self._scale_tensor,
        )
        tokens, positions = torch.from_numpy(batch.tokens[:count]), torch.from_numpy(batch.positions[:count])
        views = self._views[count] = _Views(tokens, positions, list(range(count)), step)
        return views

    def _shared_by(self, count: int) -> SharedPrefix | None:
        """Which of the first `count` rows read pages together; looked for again only when rows have changed."""
        batch, of = self.batch, (self.batch.arrangement, count)
        if self._shares and of != self._shared_of:
            assert self._memory is not None, "map() comes first"
            layer_bytes = self._memory.layout.layer_bytes
            self._shared = share(batch.tables[:count], batch.page_counts[:count], layer_bytes)
            self._shared_of = of
        return self._shared

    def _attention_batch(self, count: int, max_pages: int) -> Batch:
        batch = self.batch
        return Batch(
            tables=torch.from_numpy(batch.tables[:count]),
            page_counts=torch.from_numpy(batch.page_counts[:count]),
            tail_slots=torch.from_numpy(batch.tail_slots[:count]),
            tail_lengths=torch.from_numpy(batch.tail_lengths[:count]),
            query_starts=self._query_starts[: count + 1],
            max_pages=max_pages,
            max_query=1,
        )

    def _seal(self, seals: list[Seal]) -> list[Seal]:
        """Turns full tails into pages; returns what may be committed: page and tail were ours before and after."""
        memory = self._memory
        assert memory is not None, "map() comes first"
        seals = [seal for seal in seals if self._owns(seal)]
        if seals:
            slots = torch.tensor([seal.slot for seal in seals], dtype=torch.int32)
            blocks = torch.tensor([seal.block for seal in seals], dtype=torch.int32)
            if self._scales is not None:
                self._scales.count_tails(memory.tails, slots)
            self._model.ops.seal_tails(
                memory.pages, memory.tails, memory.layout, slots, blocks, scales=self._scale_tensor
            )
            self._fence()  # what is reported may be published and read by others
        return [seal for seal in seals if self._owns(seal)]

    def _fence(self) -> None:
        assert self._memory is not None, "map() comes first"
        self._memory.fence()

    def _owns(self, seal: Seal) -> bool:
        pool = self._memory.pool if self._memory is not None else None
        if pool is None:
            return True
        live = pool.generations
        owned = live[seal.block] == seal.generation and live[pool.blocks + seal.slot] == seal.sequence.tail_generation
        return bool(owned) and pool.live_epoch() == pool.epoch

    def _drop_stale(self, begun: bool = False) -> bool:
        """Drops sequences whose pages or tails are no longer theirs. True: the others have to do this step again.

        After the forward pass (`begun`) the step is taken back for all; doing it again writes the same bytes.
        """
        pool = self._memory.pool if self._memory is not None else None
        if pool is None:
            return False
        renewed = pool.live_epoch() != pool.epoch
        stale = self.batch.rows[:] if renewed else self.batch.stale(pool.generations, pool.blocks)
        if not stale:
            return False
        if begun:
            self.batch.undo_begin()
        self._report(Report(gone=self._forget(stale, Stale("a page of this sequence has a new tenant; recompute"))))
        return True

    def _forget(self, sequences: Seq[Sequence], error: KvrelayError | None) -> list[tuple[Key, KvrelayError | None]]:
        for sequence in sequences:
            self.batch.remove(sequence)
            del self._sequences[sequence.key]
        return [(sequence.key, error) for sequence in sequences]

    def _report(self, report: Report) -> None:
        self._catch_up()
        self._tell(report)

    def _catch_up(self) -> None:
        """Reports the step before, if that is still to be done."""
        untold, self._untold = self._untold, None
        if untold is not None:
            self._tell(untold)

    def _report_hungry(self) -> None:
        hungry = self.batch.hungry()
        if hungry:
            self._report(Report(hungry=[sequence.key for sequence in hungry]))
