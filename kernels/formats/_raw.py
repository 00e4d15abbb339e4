"""Activations as they are: K [kv_heads, head_dim, block_size], V [kv_heads, block_size, head_dim]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats._base import Format, Shape, Sizes, torch_type

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Raw(Format):
    """Little-endian elements of one float type, no scales. Rounds, and saturates at the largest finite value, only
    where the input is wider than the format."""

    def __init__(self, name: str, torch_name: str, width: int, epsilon: float, smallest: float) -> None:
        self.name = name
        self._torch_name = torch_name
        self._width = width
        self._epsilon = epsilon
        self._smallest = smallest

    @property
    def dtype(self) -> torch.dtype:
        """The torch element type."""
        return torch_type(self._torch_name)

    def sizes_k(self, shape: Shape) -> Sizes:
        return Sizes(shape.elements * self._width, 0)

    def sizes_v(self, shape: Shape) -> Sizes:
        return self.sizes_k(shape)

    def encode_k(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        return self._encode(x.permute(0, 2, 3, 1))

    def encode_v(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        return self._encode(x.permute(0, 2, 1, 3))

    def decode_k(
        self, codes: Tensor, scales: Tensor, shape: Shape, to: torch.dtype, scale: float | None = None
    ) -> Tensor:
        grid = codes.view(self.dtype).view(-1, shape.kv_heads, shape.head_dim, shape.block_size)
        return grid.to(to).permute(0, 3, 1, 2)

    def decode_v(
        self, codes: Tensor, scales: Tensor, shape: Shape, to: torch.dtype, scale: float | None = None
    ) -> Tensor:
        grid = codes.view(self.dtype).view(-1, shape.kv_heads, shape.block_size, shape.head_dim)
        return grid.to(to).permute(0, 2, 1, 3)

    def bound_k(self, x: Tensor, scale: float | None = None) -> Tensor:
        return (x.abs() * self._epsilon).clamp(min=self._smallest / 2)

    def bound_v(self, x: Tensor, scale: float | None = None) -> Tensor:
        return self.bound_k(x)

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        if self._width < 4:
            top = torch.finfo(self.dtype).max
            x = x.float().clamp(-top, top)  # in bf16 the top of fp16 would round to what is beyond it
        codes = x.to(self.dtype).contiguous().view(x.shape[0], -1).view(torch.uint8)
        return codes, codes.new_empty((x.shape[0], 0))
