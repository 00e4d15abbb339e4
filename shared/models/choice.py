"""Choosing the next tokens where the logits are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.dispatch import Ops
from shared.sampling import Choice, Sampler


@torch.inference_mode()
def choose(ops: Ops, logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice | None]:
    """One choice per row of `logits`, float32 [rows, vocab] on any device; None where the row has NaN. Waits for them.

    From a GPU one id a row comes to the host; whole rows are copied only where the sampler needs them.
    """
    choices = [None if token < 0 else Choice(token) for token in ops.argmax_rows(logits).tolist()]
    rows = [row for row, choice in enumerate(choices) if choice is not None and not samplers[row].plain]
    if rows:
        whole = logits[torch.tensor(rows, device=logits.device)].cpu().numpy()
        for at, row in enumerate(rows):
            choices[row] = samplers[row].choose(whole[at])
    return choices
