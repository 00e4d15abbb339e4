"""Learns KV scales that outlive a page from a model's own keys and values on real prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kernels.attention import Batch
from kernels.layout import PageLayout, page_layout
from kernels.scale_file import ScaleFile
from kernels.scales import Calibrator, CannotLearn, PoolScales
from shared.errors import BadRequest
from shared.models.kv_step import KVStep
from shared.models.transformer import Transformer

CHUNK = 512
"""Tokens of one forward pass, and so of one batch that a policy sees."""
CHECKS = 6
"""Most passes over pages of the format itself."""
ROOM = 1.05
"""What a layer that saturates is given beyond what it shows, as every wider scale moves the layers behind it again."""


def calibrate(
    model: Transformer,
    identity: str,
    prompts: Sequence[Sequence[int]],
    layout: PageLayout,
    policy: str = "max",
    progress: Callable[[str, int], None] = lambda what, tokens: None,
) -> ScaleFile:
    """Scales for pools of `layout` from token ids of real prompts.

    The first pass has pages in the compute dtype, since scales should not depend on a guess of themselves. Quantised
    pages move what later layers see: `max` therefore runs over its own pages until no prompt saturates any more, or
    `CHECKS` times. Prompts beyond the model's context are cut there. `progress` hears what is done, and how many tokens
    of it are. Raises BadRequest if there is nothing to learn from.
    """
    calibrator, raw = Calibrator(layout, policy), layout.tail_format
    plain = page_layout(raw, raw, layout.block_size, layout.layers, layout.kv_heads, layout.head_dim, tail_format=raw)
    count = sum(min(len(prompt), model.config.context_length) for prompt in prompts)
    if not count:
        raise BadRequest("there are no prompts to calibrate from")

    def learned() -> ScaleFile:
        k_scale, v_scale = (tuple(side) for side in calibrator.scales().T.tolist())
        return ScaleFile(k_scale, v_scale, identity, layout.k_format, layout.v_format, policy, count)

    try:
        for done in run_over(model, prompts, plain, None, calibrator.observe):
            progress("calibrating", done)
        found = learned()
        for _ in range(CHECKS if policy == "max" else 0):
            scales = PoolScales(found, layout)

            def widen(layer: int, k: torch.Tensor, v: torch.Tensor, scales: PoolScales = scales) -> None:
                before = scales.clipped
                scales.count(layer, k, v)
                if scales.clipped > before:
                    calibrator.observe(layer, k * ROOM, v * ROOM)

            for done in run_over(model, prompts, layout, scales.tensor, widen):
                progress("checking", done)
            if not scales.clipped:
                break
            found = learned()
    except CannotLearn as error:
        raise BadRequest(str(error)) from error
    return found


def run_over(
    model: Transformer,
    prompts: Iterable[Sequence[int]],
    layout: PageLayout,
    scales: torch.Tensor | None,
    observe: Callable[[int, torch.Tensor, torch.Tensor], None],
    chunk: int = CHUNK,
) -> Iterator[int]:
    """Runs the model over each prompt, with pages of `layout`, `chunk` tokens (whole pages) in one pass.

    `observe` sees layer, keys and values before they are stored. Yields how many tokens are done after each chunk.
    """
    size, tokens = layout.block_size, 0
    for prompt in prompts:
        ids = torch.tensor(prompt[: model.config.context_length], dtype=torch.int64)
        pages = torch.zeros(-(-ids.numel() // size), layout.page_bytes, dtype=torch.uint8)
        tails = torch.zeros(1, layout.tail_bytes, dtype=torch.uint8)
        for start in range(0, ids.numel(), chunk):
            stop = min(start + chunk, ids.numel())
            step = _step(pages, tails, layout, start, stop)
            step.observe, step.scales = observe, scales
            model.forward(ids[start:stop], torch.arange(start, stop), step, [])
            tokens += stop - start
            yield tokens


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
