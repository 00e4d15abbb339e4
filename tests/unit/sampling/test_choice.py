"""Choosing where the logits are gives what choosing on the host gives, from little more than the ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.dispatch import Ops
from shared.messages import Sampling
from shared.models.choice import choose
from shared.sampling import Sampler

VOCAB = 300


def sampler(**settings: Any) -> Sampler:
    return Sampler(
        Sampling(**settings), request_id="r", tokens=np.arange(5), prompt_tokens=5, eos_token_ids=(1,),
        vocab_size=VOCAB, max_tokens=9, max_model_len=64,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rows_of_every_kind(backend: str) -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, [7, 250]] = 50.0  # the lowest of the greatest
    logits[1, 40] = torch.nan
    logits[2] = -torch.inf
    logits[3, 299] = torch.inf
    logits[4, 9] = torch.nan
    samplers = [
        *(sampler(temperature=0.0) for _ in range(4)),
        sampler(temperature=1.0, seed=3),
        sampler(temperature=0.8, seed=4, top_p=0.9),
        sampler(temperature=0.0, logprobs=2),
        sampler(temperature=0.0, min_tokens=3),
    ]
    found = choose(Ops(backend), logits, samplers)
    broken = logits.isnan().any(dim=1).tolist()
    rows = zip(broken, logits.numpy(), samplers, strict=True)
    assert found == [None if nan else one.choose(row) for nan, row, one in rows]
    assert [None if one is None else one.token for one in found[:5]] == [7, None, 0, 299, None]


def test_only_rows_that_are_needed_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    whole = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self.numel()) or whole(self))
    logits = torch.randn(4, VOCAB)
    choose(Ops("reference"), logits, [sampler(temperature=0.0) for _ in range(4)])
    assert moved == []
    kinds = [sampler(temperature=t, seed=1) for t in (0.0, 1.0, 0.0, 1.0)]
    choose(Ops("reference"), logits, kinds)
    assert moved == [2 * VOCAB]
