"""Learns KV scales that outlive a page from a model's own keys and values on real prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kernels.attention import Batch
from kernels.layout import PageLayout, page_layout
from kernels.scale_file import ScaleFile
from kernels.scales import Calibrator
from shared.errors import BadRequest
from shared.models.kv_step import KVStep
from shared.models.transformer import Transformer

CHUNK = 512
"""Tokens of one forward pass, and so of one batch that a policy sees."""


def calibrate(
    model: Transformer,
    identity: str,
    prompts: Iterable[Sequence[int]],
    layout: PageLayout,
    policy: str = "max",
    progress: Callable[[int], None] = lambda tokens: None,
) -> ScaleFile:
    """Scales for pools of `layout` from token ids of real prompts; `progress` hears how many tokens are done.

    The pages of the calibrating pass itself are in the compute dtype: scales do not depend on an earlier guess of
    themselves. Prompts beyond the model's context are cut there. Raises BadRequest if there is nothing to learn from.
    """
    calibrator = Calibrator(layout, policy)
    raw, size, longest = layout.tail_format, layout.block_size, model.config.context_length
    plain = page_layout(raw, raw, size, layout.layers, layout.kv_heads, layout.head_dim, tail_format=raw)
    tokens = 0

    def observe(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        try:
            calibrator.observe(layer, k, v)
        except ValueError as error:
            raise BadRequest(str(error)) from error

    for prompt in prompts:
        ids = torch.tensor(prompt[:longest], dtype=torch.int64)
        pages = torch.zeros(-(-ids.numel() // size), plain.page_bytes, dtype=torch.uint8)
        tails = torch.zeros(1, plain.tail_bytes, dtype=torch.uint8)
        for start in range(0, ids.numel(), CHUNK):
            stop = min(start + CHUNK, ids.numel())
            step = _step(pages, tails, plain, start, stop)
            step.observe = observe
            model.forward(ids[start:stop], torch.arange(start, stop), step, [])
            tokens += stop - start
            progress(tokens)
    if not tokens:
        raise BadRequest("there are no prompts to calibrate from")
    try:
        found = calibrator.scales()
    except ValueError as error:
        raise BadRequest(str(error)) from error
    k_scale, v_scale = (tuple(side) for side in found.T.tolist())
    return ScaleFile(k_scale, v_scale, identity, layout.k_format, layout.v_format, policy, tokens)


def _step(pages: torch.Tensor, tails: torch.Tensor, layout: PageLayout, start: int, stop: int) -> KVStep:
    """Positions start..stop of the only sequence in this memory; start is a page border."""
    first, full, rest = start // layout.block_size, stop // layout.block_size, stop % layout.block_size
    table = torch.arange(full, dtype=torch.int32)
    batch = Batch(
        tables=table[None],
        page_counts=torch.tensor([full], dtype=torch.int32),
        tail_slots=torch.zeros(1, dtype=torch.int32),
        tail_lengths=torch.tensor([rest], dtype=torch.int32),
        query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
        max_pages=full,
        max_query=stop - start,
    )
    slots, positions = torch.zeros(rest, dtype=torch.int32), torch.arange(rest, dtype=torch.int32)
    return KVStep(pages, tails, layout, batch, slots, positions, seal_blocks=table[first:])
