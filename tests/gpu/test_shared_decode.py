"""The decode engine over pages that sequences share: who reads together follows the batch, in captured steps too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from infra.bench.paged_run import layout_of
from kernels import shared_prefix
from kernels.dispatch import Ops, select
from services.decode import engine as decode
from services.decode.batch import Sequence
from services.decode.engine import DecodeEngine, Report
from shared.messages import Sampling
from shared.models.files import ModelFiles
from shared.models.graphs import DecodeGraphs
from shared.models.runtime import Memory
from shared.models.transformer import Transformer
from shared.sampling import Sampler
from tests.support import recorded_graphs
from tests.support.recorded_graphs import RecordedOps

BLOCK, BLOCKS, LONGEST = 16, 12, 128
TABLES = {"first": [0, 1, 2], "alone": [5, 6], "other": [0, 1], "grows": [0, 1, 3], "late": [0, 1, 4]}
"""Pages 0 and 1 are those of a prompt."""
TAILS = {"first": 3, "alone": 5, "other": 0, "grows": BLOCK - 1, "late": 7}
Found = list[tuple[str, int, float]]


class Run:
    """An engine on one model, over random pages that are the same for every run."""

    def __init__(self, model: Transformer) -> None:
        layout = layout_of(model.config, "float32", "fp32")
        generator = torch.Generator().manual_seed(5)
        pages = torch.randn(BLOCKS, layout.page_bytes // 4, generator=generator).view(torch.uint8)
        tails = torch.randn(len(TABLES), layout.tail_bytes // 4, generator=generator).view(torch.uint8)
        self.reports: list[Report] = []
        self.engine = DecodeEngine(model, 8, LONGEST, BLOCK, self.reports.append, lambda: True)
        self.engine.map(Memory(pages.to(model.device), tails.to(model.device), layout))

    def add(self, name: str) -> None:
        table, tail = np.array(TABLES[name], np.int32), list(range(TAILS[name]))
        length = len(table) * BLOCK + len(tail)
        sampler = Sampler(
            Sampling(temperature=0.0, ignore_eos=True, logprobs=0), request_id=name, tokens=np.zeros(length + 1, int),
            prompt_tokens=length, eos_token_ids=(), vocab_size=101, max_tokens=40, max_model_len=LONGEST,
        )  # fmt: skip
        slot = list(TABLES).index(name)
        sequence = Sequence((name, 0), sampler, slot, 0, table, np.zeros(len(table), np.uint32), tail, slot)
        sequence.ready.extend([(8 + slot % 4, 0)])
        self.engine.add(sequence)

    def through(self) -> Found:
        """Sequences come and go; what a row is changes under a graph of the same shape."""
        for name in ("first", "other", "grows", "alone"):
            self.add(name)
        self.step(2)
        self.engine.drop(("first", 0))  # whose table the others were read by, and whose row the one alone takes
        self.step(1)
        self.add("late")
        self.step(1)
        for name in ("other", "late"):
            self.engine.drop((name, 0))
        self.step(1)
        return [
            (emission.sequence.key[0], emission.choice.token, emission.choice.logprob.logprob)
            for report in self.reports
            for emission in report.emissions
            if emission.choice is not None and emission.choice.logprob is not None
        ]

    def step(self, times: int) -> None:
        for _ in range(times):
            assert self.engine.step()


@pytest.mark.parametrize("captured", [False, True])
def test_an_engine_reads_together_what_its_batch_shares(
    captured: bool, files: ModelFiles, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_PAGES", 1)
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 1)
    planned: list[Any] = []

    def share(tables: np.ndarray, counts: np.ndarray, layer_bytes: int) -> Any:
        planned.append(shared_prefix.share(tables, counts, layer_bytes))
        return planned[-1]

    monkeypatch.setattr(decode, "share", share)
    exact = Run(Transformer(files, "float32", select("reference"), 1)).through()
    assert not planned, "another backend needs no plan"

    ops: Ops = select("triton", "cuda") if device.type == "cuda" else RecordedOps("triton")
    if captured and device.type == "cpu":
        recorded_graphs.install(monkeypatch)
    model = Transformer(files, "float32", ops, 1, str(device))
    model._graphs = DecodeGraphs(device, model._compute) if captured else None
    found = Run(model).through()

    sizes = [None if plan is None else sorted(plan.first_pages.tolist()) for plan in planned]
    assert sizes == [[0, 2, 2, 2], [0, 2, 2], [0, 2, 2, 2], None], "once for each arrangement of rows"
    assert [one[:2] for one in found] == [one[:2] for one in exact]
    assert max(abs(one[2] - other[2]) for one, other in zip(found, exact, strict=True)) < 1e-3
    if model._graphs is not None:
        assert sorted(model._graphs._graphs) == [(2, 4, 0), (4, 4, 4)]
