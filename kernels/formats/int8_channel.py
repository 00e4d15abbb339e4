"""`int8_channel`: int8, keys scaled per channel inside the page around a centre, values per token and KV head.

Byte format: K codes int8 [kv_heads, head_dim, block_size]; K scales fp16 [kv_heads, 2, head_dim], row 0 the scale s,
row 1 the centre c; k = c + s * code, with c = fp16((max + min) / 2) and s = fp16_up(max|k - c| / 127) over the page's
tokens. V as in `int8`. A channel with a large constant bias, common in keys, costs no precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats._base import Shape, Sizes
from kernels.formats._codes import FP16_MAX, INT8, fp16_up
from kernels.formats._per_token import PerTokenHead

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Int8Channel(PerTokenHead):
    """K per channel, V per token."""

    def __init__(self) -> None:
        super().__init__("int8_channel", INT8)

    def sizes_k(self, shape: Shape) -> Sizes:
        return Sizes(shape.elements, shape.kv_heads * 2 * shape.head_dim * 2)

    def sizes_v(self, shape: Shape) -> Sizes:
        return super().sizes_k(shape)

    def encode_k(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        import torch

        s, c = self._scale_and_centre(x)
        codes = INT8.encode((x.float() - c.float()) / s.float()).permute(0, 2, 3, 1).flatten(1)
        both = torch.cat((s, c), dim=1).permute(0, 2, 1, 3)
        return codes, both.contiguous().flatten(1).view(torch.uint8)

    def decode_k(self, codes: Tensor, scales: Tensor, shape: Shape, to: dtype, scale: float | None = None) -> Tensor:
        import torch

        grid = codes.view(-1, shape.kv_heads, shape.head_dim, shape.block_size).permute(0, 3, 1, 2)
        both = scales.view(torch.float16).view(-1, shape.kv_heads, 2, shape.head_dim).permute(0, 2, 1, 3).to(to)
        return INT8.decode(grid, to) * both[:, :1] + both[:, 1:]

    def bound_k(self, x: Tensor, scale: float | None = None) -> Tensor:
        return self._scale_and_centre(x)[0].to(x.dtype) / 2

    def bound_v(self, x: Tensor, scale: float | None = None) -> Tensor:
        return super().bound_k(x)

    @staticmethod
    def _scale_and_centre(x: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        low, high = x.float().aminmax(dim=1, keepdim=True)
        c = ((high + low) * 0.5).clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
        s = fp16_up(torch.maximum(high - c.float(), c.float() - low) / 127.0)
        return s, c


FORMAT = Int8Channel()
