"""A whole model on Triton's ops, and its decode steps as CUDA graphs, against the reference ops."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from infra.bench.paged_run import PagedRun, layout_of
from kernels.dispatch import select
from shared.models.files import ModelFiles
from shared.models.graphs import DecodeGraphs
from shared.models.transformer import Transformer
from tests.support import recorded_graphs
from tests.support.recorded_graphs import RecordedOps

TOKENS = [int(token) for token in torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(3))]


def through_pages(model: Transformer, kv_cache_dtype: str) -> torch.Tensor:
    """Logits of two sequences: chunks of prefill, then decode together over the edge of a page."""
    run = PagedRun(model, layout_of(model.config, "float32", kv_cache_dtype), 2, 64)
    run.pages, run.tails = run.pages.to(model.device), run.tails.to(model.device)
    parts = [run.prefill(0, TOKENS[:16]), run.prefill(0, TOKENS[16:20]), run.prefill(1, TOKENS[:15])]
    return torch.cat(parts + [run.decode([0, 1], [token, token + 1]) for token in TOKENS[20:24]])


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "int8_channel"])
def test_a_model_over_pages(kv_cache_dtype: str, files: ModelFiles, device: torch.device) -> None:
    exact = through_pages(Transformer(files, "float32", select("reference"), 1), kv_cache_dtype)
    model = Transformer(files, "float32", select("triton", device.type), 1, str(device))
    assert (through_pages(model, kv_cache_dtype) - exact).abs().max() < (1e-3 if kv_cache_dtype == "fp32" else 2e-2)


def test_captured_steps_are_those_of_the_eager_pass(
    files: ModelFiles, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = select("triton", "cuda") if device.type == "cuda" else RecordedOps("triton")
    if device.type == "cpu":
        recorded_graphs.install(monkeypatch)
    model = Transformer(files, "float32", ops, 1, str(device))
    model._graphs = None
    eager = batches(model)
    model._graphs = DecodeGraphs(device, model._compute)
    captured = batches(model)
    assert (captured.logits - eager.logits).abs().max() < 2e-2  # a code may round the other way
    torch.testing.assert_close(captured.tails.view(torch.float32), eager.tails.view(torch.float32))
    codes = [outcome.pages.view(torch.int8).int() for outcome in (captured, eager)]
    assert (codes[0] - codes[1]).abs().max() <= 1  # in particular, padding writes nowhere


class Outcome(NamedTuple):
    logits: torch.Tensor
    pages: torch.Tensor
    tails: torch.Tensor


def batches(model: Transformer) -> Outcome:
    """Three sequences that decode alone and together, over edges of pages; each graph is used more than once."""
    run = PagedRun(model, layout_of(model.config, "float32", "int8_per_tensor"), 3, 64)
    run.pages, run.tails = run.pages.to(model.device), run.tails.to(model.device)
    run.scales = torch.tensor([[0.05, 0.04], [0.03, 0.02]])  # on the host, as the engine has them
    for sequence, chunks in enumerate(([14], [32, 1], [3])):
        for length in chunks:
            run.prefill(sequence, TOKENS[:length])
    logits = []
    for token in range(2):
        for rows in ([0], [0, 1, 2], [2, 1]):
            # on the CPU a copy to the host is none, and the next replay would write into it
            logits.append(run.decode(rows, [TOKENS[token + row] for row in rows]).clone())
            # what a graph reads and nobody else keeps would be overwritten by this
            junk = [torch.full((16,), 2**30, dtype=torch.int32, device=model.device) for _ in range(99)]
            del junk
    return Outcome(torch.cat(logits), run.pages.cpu(), run.tails.cpu())
