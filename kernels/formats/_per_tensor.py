"""One scale per layer and side, from a scale file: x = scale * code. The page stores codes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats._base import Format, Shape, Sizes
from kernels.formats._codes import Code

if TYPE_CHECKING:
    from torch import Tensor, dtype


def required(name: str, scale: float | None) -> float:
    """The scale, or ValueError: a per-tensor format without its scale would store garbage."""
    if scale is None:
        raise ValueError(f"{name} needs scales that outlive a page; give kv_scales_path")
    return scale


class PerTensor(Format):
    """K codes [kv_heads, head_dim, block_size], V codes [kv_heads, block_size, head_dim], one byte each, no scales in
    the page. Elements beyond scale * top saturate; `kernels.scales` counts them."""

    outlives_page = True

    def __init__(self, name: str, code: Code) -> None:
        self.name = name
        self.code = code

    def sizes_k(self, shape: Shape) -> Sizes:
        return Sizes(shape.elements, 0)

    def sizes_v(self, shape: Shape) -> Sizes:
        return self.sizes_k(shape)

    def encode_k(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        return self._encode(x.permute(0, 2, 3, 1), scale)

    def encode_v(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        return self._encode(x.permute(0, 2, 1, 3), scale)

    def decode_k(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        grid = codes.view(-1, shape.kv_heads, shape.head_dim, shape.block_size).permute(0, 3, 1, 2)
        return self.code.decode(grid, to) * required(self.name, scale)

    def decode_v(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        grid = codes.view(-1, shape.kv_heads, shape.block_size, shape.head_dim).permute(0, 2, 1, 3)
        return self.code.decode(grid, to) * required(self.name, scale)

    def bound_k(self, x: Tensor, scale: float | None = None) -> Tensor:
        s = required(self.name, scale)
        clipped = (x.abs() - s * self.code.top).clamp(min=0)
        return self.code.bound(x, x.new_tensor(s)) + clipped

    def bound_v(self, x: Tensor, scale: float | None = None) -> Tensor:
        return self.bound_k(x, scale)

    def _encode(self, x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        import torch

        s = torch.tensor(required(self.name, scale), dtype=torch.float32, device=x.device)
        codes = self.code.encode(x.float() / s).contiguous().flatten(1)
        return codes, codes.new_empty((x.shape[0], 0))
