"""Eight-bit codes under a scale, and the rounding rules all quantised formats share.

Scales are fp16, rounded **up**, so that the largest element never clips; they are floored at 2^-24 (the smallest fp16),
so that nothing divides by zero and an all-zero group decodes to exact zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels.formats._base import torch_type

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP16_MAX = 65504.0


def fp16_up(x: Tensor) -> Tensor:
    """The smallest fp16 >= x (x >= 0, fp32), at least 2^-24, at most 65504."""
    import torch

    near = x.clamp(max=FP16_MAX).to(torch.float16)
    bits = near.view(torch.int16)
    up = torch.where(near.to(torch.float32) < x, bits + 1, bits).clamp(1, 0x7BFF)
    return up.to(torch.int16).view(torch.float16)


class Code(Protocol):
    """How x/s becomes one byte. `top` is the largest magnitude a code can hold."""

    top: float

    def encode(self, ratio: Tensor) -> Tensor:
        """uint8 codes of fp32 ratios |ratio| <= top (rounding noise beyond it saturates)."""

    def decode(self, codes: Tensor, to: torch.dtype) -> Tensor:
        """Values of uint8 codes in dtype `to`."""

    def bound(self, x: Tensor, scale: Tensor) -> Tensor:
        """Largest |decoded - x| under `scale`."""


class Int8Code:
    """Two's complement, symmetric: -127..127."""

    top = 127.0

    def encode(self, ratio: Tensor) -> Tensor:
        import torch

        return ratio.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)

    def decode(self, codes: Tensor, to: torch.dtype) -> Tensor:
        import torch

        return codes.view(torch.int8).to(to)

    def bound(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale / 2


class Fp8Code:
    """OCP eight-bit floats. Saturates instead of producing infinity or NaN."""

    def __init__(self, torch_name: str, top: float, epsilon: float, smallest: float) -> None:
        self.top = top
        self._torch_name = torch_name
        self._epsilon = epsilon
        self._smallest = smallest

    @property
    def dtype(self) -> torch.dtype:
        """The torch element type."""
        return torch_type(self._torch_name)

    def encode(self, ratio: Tensor) -> Tensor:
        import torch

        return ratio.clamp(-self.top, self.top).to(self.dtype).view(torch.uint8)

    def decode(self, codes: Tensor, to: torch.dtype) -> Tensor:
        return codes.view(self.dtype).to(to)

    def bound(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x.abs() * self._epsilon).maximum(scale * (self._smallest / 2))


INT8 = Int8Code()
E4M3 = Fp8Code("float8_e4m3fn", top=448.0, epsilon=2**-4, smallest=2**-9)
E5M2 = Fp8Code("float8_e5m2", top=57344.0, epsilon=2**-3, smallest=2**-16)
