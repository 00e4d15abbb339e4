"""Learning and applying scales that outlive a page: one number per layer for K and one for V (`scale_file`).

Writer and reader of a pool share one object. Policies: `max` is the largest magnitude ever seen; `smoothed_max` forgets
old peaks, m = max(current, gamma * m), and like `max` never lies below what it sees now, so that nothing clips while it
is followed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels import formats
from kernels.formats._per_tensor import PerTensor
from kernels.layout import PageLayout
from kernels.reference._pages import tail_dtype
from kernels.scale_file import SIDES, ScaleFile

POLICIES = ("max", "smoothed_max")


def top(format_name: str) -> float:
    """Largest code magnitude of a per-tensor format: its scale is the largest |x| divided by this."""
    found = formats.load(format_name)
    if not isinstance(found, PerTensor):
        raise ValueError(f"{format_name} keeps its scales in the page")
    return found.code.top


class PoolScales:
    """The scales of a pool as every op takes them, and a count of what saturates under them.

    `tensor` is fp32 [layers, 2] (K, V). Not thread-safe: one compute thread counts; anyone may read the fraction.
    """

    def __init__(self, scales: ScaleFile, layout: PageLayout) -> None:
        self.tensor = torch.tensor([scales.k_scale, scales.v_scale], dtype=torch.float32).T.contiguous()
        places = (layout.layer(index) for index in range(layout.layers))
        tops = [[_top_or_infinity(place.k_format), _top_or_infinity(place.v_format)] for place in places]
        self._limits = self.tensor * torch.tensor(tops)
        self._rows = self._limits.tolist()
        self._layout = layout
        self.clipped = 0
        self.stored = 0

    @property
    def clipped_fraction(self) -> float:
        """Share of the elements stored so far under these scales that saturated."""
        return self.clipped / self.stored if self.stored else 0.0

    def reset(self) -> None:
        """Forgets the counts, after warming up."""
        self.clipped = self.stored = 0

    def count(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Before keys and values of one layer are sealed; any shape."""
        for x, limit in zip((k, v), self._rows[layer], strict=True):
            if limit != math.inf and x.numel():
                self.clipped += int((x.abs() > limit).sum())
                self.stored += x.numel()

    def count_tails(self, tails: Tensor, slots: Tensor) -> None:
        """Before full tails are sealed. tails uint8 [slots, tail_bytes]; slots int32 [n]."""
        layout = self._layout
        full = tails[slots.long()].view(tail_dtype(layout)).view(slots.numel(), layout.layers, 2, layout.shape.elements)
        limits = self._limits.to(full.device)[None, :, :, None]
        self.clipped += int((full.abs() > limits).sum())
        self.stored += slots.numel() * int(self._limits.isfinite().sum()) * layout.shape.elements


def _top_or_infinity(format_name: str) -> float:
    return top(format_name) if formats.load(format_name).outlives_page else math.inf


class CannotLearn(ValueError):
    """Activations that no scale can be learned from."""


class Calibrator:
    """Learns scales from activations. Batches that are all zero (padding, warm-up) teach nothing."""

    def __init__(self, layout: PageLayout, policy: str = "max", gamma: float = 0.99) -> None:
        if policy not in POLICIES:
            raise ValueError(f"scale policy must be {' or '.join(POLICIES)}, not {policy!r}")
        if not 0 < gamma < 1:
            raise ValueError(f"gamma must lie between 0 and 1, not {gamma}")
        sides = (layout.k_format, layout.v_format)
        self._tops = torch.tensor([top(name) if formats.load(name).outlives_page else 1.0 for name in sides])
        self._keep = gamma if policy == "smoothed_max" else 1.0
        self._peaks = torch.zeros(layout.layers, 2)

    def observe(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Takes in one batch of keys and values of a layer, of any shape. Raises CannotLearn for NaN or infinity."""
        for side, x in enumerate((k, v)):
            current = float(x.float().abs().max()) if x.numel() else 0.0
            if not math.isfinite(current):
                raise CannotLearn(f"{SIDES[side]} of layer {layer}: activations are not finite")
            if current > 0:
                self._peaks[layer, side] = max(current, self._keep * float(self._peaks[layer, side]))

    def scales(self) -> Tensor:
        """fp32 [layers, 2], rounded up so that the peak itself does not clip. CannotLearn if a layer saw nothing."""
        for layer, side in (self._peaks == 0).nonzero().tolist():
            raise CannotLearn(f"{SIDES[side]} of layer {layer} saw only zeros; calibrate on real prompts")
        exact = self._peaks / self._tops
        short = exact * self._tops < self._peaks
        return torch.where(short, torch.nextafter(exact, torch.tensor(math.inf)), exact)
