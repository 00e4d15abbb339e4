"""One forward pass's dealings with the pool: what `kernels.attention` takes together, and what it does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.attention import SharedPrefix
from kernels.dispatch import select
from kernels.layout import page_layout
from shared.models.config import ModelConfig, Rope
from shared.models.kv_step import KVStep
from tests.support import kv_cases
from tests.support.kv_cases import i32

CONFIG = ModelConfig("llama", "two layers", 2, 4, 2, 64, 256, 512, 100, 1e-5, 512, Rope(), sliding_window=20,
                     sliding_layers=(1,))  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layer", [0, 1])
def test_layers_with_a_window_read_shared_pages_for_themselves(backend: str, layer: int) -> None:
    layout = page_layout("fp32", "fp32", 16, 2, 2, 64, tail_format="fp32")
    case = kv_cases.build(layout, [70, 71], layer=layer)
    tables = case.batch.tables.clone()
    tables[1, :4] = tables[0, :4]
    plan = SharedPrefix(members=i32(0, 1), member_starts=i32(0, 2), page_counts=i32(4), first_pages=i32(4, 4),
                        max_members=2)  # fmt: skip
    apart = dataclasses.replace(case.batch, tables=tables)
    q, k, v = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    found = []
    for batch in (apart, dataclasses.replace(apart, shared=plan)):
        step = KVStep(case.pages, case.tails, layout, batch, batch.tail_slots, batch.tail_lengths - 1)
        found.append(step.write_and_attend(select(backend), CONFIG, layer, q, k, v))
    assert torch.equal(*found) and found[0].isfinite().all()
