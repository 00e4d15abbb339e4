"""What every KV format answers: how many bytes, how to encode, how to decode, and how wrong it may be.

Shapes, with n pages: activations `x` are [n, block_size, kv_heads, head_dim]; codes and scales are uint8 [n, bytes].
K codes are channel-major inside the page, V codes token-major (`layout.py`). Arithmetic of encoding is IEEE fp32 with
round-to-nearest-even, in the order written here, so that the native and the Triton encoders produce the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Sizes(NamedTuple):
    """Bytes of one side (K or V) of one layer of one page, before alignment."""

    codes: int
    scales: int


@dataclass(frozen=True)
class Shape:
    """Geometry of one layer of one page."""

    block_size: int
    kv_heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        return self.block_size * self.kv_heads * self.head_dim


def torch_type(name: str) -> dtype:
    """The element type `torch.<name>`; looked up late, since geometry needs no torch."""
    import torch

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class Format(ABC):
    """One KV format. `scale` arguments are the per-tensor scale of formats with `outlives_page`; others ignore them."""

    name: str
    outlives_page: bool = False
    """True: the scale is one number per layer and side from a scale file (`kernels.scales`), not stored in the page."""

    @abstractmethod
    def sizes_k(self, shape: Shape) -> Sizes: ...

    @abstractmethod
    def sizes_v(self, shape: Shape) -> Sizes: ...

    @abstractmethod
    def encode_k(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales of the K side."""

    @abstractmethod
    def encode_v(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales of the V side."""

    @abstractmethod
    def decode_k(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        """The K side as [n, block_size, kv_heads, head_dim] in dtype `to` (fp32 or fp64)."""

    @abstractmethod
    def decode_v(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        """The V side, like `decode_k`."""

    @abstractmethod
    def bound_k(self, x: Tensor, scale: float | None = None) -> Tensor:
        """Stated bound of |decoded - x| for K, broadcastable to x; fp32 rounding of 1e-6 |x| comes on top."""

    @abstractmethod
    def bound_v(self, x: Tensor, scale: float | None = None) -> Tensor:
        """Stated bound for V, like `bound_k`."""
