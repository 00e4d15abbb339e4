"""Choosing the next tokens where the logits are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.dispatch import Ops
from shared.sampling import Choice, Sampler, choose_tokens


@torch.inference_mode()
def choose(ops: Ops, logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice | None]:
    """As `choose_tokens`, for logits float32 [rows, vocab] on any device; waits for them."""
    if logits.device.type == "cpu":
        return choose_tokens(logits.numpy(), samplers)
    return choose_remotely(ops, logits, samplers)


def choose_remotely(ops: Ops, logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice | None]:
    """One id a row comes to the host, and the whole row only where the sampler needs it."""
    best = torch.where(logits.isnan().any(dim=1), -1, ops.argmax_rows(logits))
    choices = [None if token < 0 else Choice(token) for token in best.tolist()]
    rows = [row for row, choice in enumerate(choices) if choice is not None and not samplers[row].plain]
    if rows:
        whole = logits[torch.tensor(rows, device=logits.device)].cpu().numpy()
        for at, row in enumerate(rows):
            choices[row] = samplers[row].choose(whole[at])
    return choices
