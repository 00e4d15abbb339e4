"""One scale per token and KV head: x = s[token, head] * code, s = fp16_up(max|x| / top)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats._base import Format, Shape, Sizes
from kernels.formats._codes import Code, fp16_up

if TYPE_CHECKING:
    from torch import Tensor, dtype


class PerTokenHead(Format):
    """K codes [kv_heads, head_dim, block_size], V codes [kv_heads, block_size, head_dim], one byte each; on both sides
    scales fp16 [kv_heads, block_size]."""

    def __init__(self, name: str, code: Code) -> None:
        self.name = name
        self._code = code

    def sizes_k(self, shape: Shape) -> Sizes:
        return Sizes(shape.elements, shape.kv_heads * shape.block_size * 2)

    def sizes_v(self, shape: Shape) -> Sizes:
        return self.sizes_k(shape)

    def encode_k(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        codes, scales = self._encode(x)
        return codes.permute(0, 2, 3, 1).flatten(1), scales

    def encode_v(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        codes, scales = self._encode(x)
        return codes.permute(0, 2, 1, 3).flatten(1), scales

    def decode_k(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        grid = codes.view(-1, shape.kv_heads, shape.head_dim, shape.block_size).permute(0, 3, 1, 2)
        return self._code.decode(grid, to) * self._scales(scales, shape, to)

    def decode_v(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        grid = codes.view(-1, shape.kv_heads, shape.block_size, shape.head_dim).permute(0, 2, 1, 3)
        return self._code.decode(grid, to) * self._scales(scales, shape, to)

    def bound_k(self, x: Tensor, scale: float | None = None) -> Tensor:
        return self._code.bound(x, self._scale_of(x).to(x.dtype))

    def bound_v(self, x: Tensor, scale: float | None = None) -> Tensor:
        return self.bound_k(x)

    def _scale_of(self, x: Tensor) -> Tensor:
        return fp16_up(x.float().abs().amax(dim=-1, keepdim=True) / self._code.top)

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        s = self._scale_of(x)
        codes = self._code.encode(x.float() / s.float())
        return codes, s.squeeze(-1).permute(0, 2, 1).contiguous().flatten(1).view(torch.uint8)

    def _scales(self, scales: Tensor, shape: Shape, to: dtype) -> Tensor:
        import torch

        s = scales.view(torch.float16).view(-1, shape.kv_heads, shape.block_size)
        return s.permute(0, 2, 1).unsqueeze(-1).to(to)
