"""`int4`: four bits, asymmetric; keys per channel inside the page, values per token in groups of 32 channels.

Byte format. Two codes share a byte along the channel axis: low nibble channel j, high nibble channel j + head_dim/2.
K codes [kv_heads, head_dim/2, block_size] and V codes [kv_heads, block_size, head_dim/2], j being the row or column.
A value is s * (code - z) with code 0..15, and a scale byte and a zero byte per group:
- scale byte: an unsigned float of 5 exponent and 3 mantissa bits, s = 2^(e - 24) * (1 + m/8), rounded up; its fp32 bits
  are `(byte << 20) + (103 << 23)`;
- zero byte: two's complement z, in units of s.
K scales [kv_heads, 2, head_dim]: row 0 scale bytes, row 1 zero bytes. V scales [kv_heads, 2, groups, block_size]: row 0
scale bytes, row 1 zero bytes. Each half of the channels is cut into groups of at most 32 (`value_groups`), those of the
low half first: 64 channels have 2 groups, 80 and 96 have 4 (32 + 8, 32 + 16 in each half), 128 has 4, 256 has 8.

s = up(max((high - low) / 15, -low / 127, low / 128)) and z = round(-low / s): |decoded - x| <= s/2 and zero is exact.
The largest s is 240: a range wider than 3,600 saturates, at the cost of all that shares its scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats._base import Format, Shape, Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = 32


def value_groups(head_dim: int) -> int:
    """How many scale groups one token of V has."""
    return 2 * -(-(head_dim // 2) // GROUP)


def _e5m3_up(x: Tensor) -> Tensor:
    """Smallest scale byte whose value is >= x (x >= 0, fp32); saturates at 0 and 255."""
    import torch

    bits = x.view(torch.int32)
    return ((bits + 0xFFFFF >> 20) - (103 << 3)).clamp(0, 255)


def _e5m3(byte: Tensor) -> Tensor:
    """fp32 values of scale bytes."""
    import torch

    return ((byte.to(torch.int32) << 20) + (103 << 23)).view(torch.float32)


def _quantise(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scale byte and zero (int32) of the range [low, high]."""
    import torch

    need = torch.maximum((high - low) / 15.0, torch.maximum(low / -127.0, low / 128.0))
    byte = _e5m3_up(need)
    zero = (-low / _e5m3(byte)).round().clamp(-128, 127)
    return byte, zero.to(torch.int32)


def _pack(codes: Tensor) -> Tensor:
    """uint8 [..., head_dim/2] of integer codes [..., head_dim]."""
    import torch

    half = codes.shape[-1] // 2
    return (codes[..., :half] | codes[..., half:] << 4).to(torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    import torch

    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bytes(scale: Tensor, zero: Tensor, dim: int) -> Tensor:
    """uint8 with scale and zero bytes stacked along a new axis `dim`."""
    import torch

    return torch.stack((scale.to(torch.uint8), zero.to(torch.int8).view(torch.uint8)), dim=dim)


class Int4(Format):
    """K per channel, V per token and group."""

    name = "int4"

    def sizes_k(self, shape: Shape) -> Sizes:
        return Sizes(shape.elements // 2, shape.kv_heads * 2 * shape.head_dim)

    def sizes_v(self, shape: Shape) -> Sizes:
        return Sizes(shape.elements // 2, shape.kv_heads * 2 * value_groups(shape.head_dim) * shape.block_size)

    def encode_k(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        byte, zero = _quantise(*x.float().aminmax(dim=1, keepdim=True))
        codes = self._codes(x, byte, zero)
        return _pack(codes).permute(0, 2, 3, 1).flatten(1), _bytes(byte[:, 0], zero[:, 0], 2).flatten(1)

    def encode_v(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        byte, zero = self._value_scales(x)
        group = self._group_of(x)
        codes = self._codes(x, byte[..., group], zero[..., group])
        scales = _bytes(byte.permute(0, 2, 3, 1), zero.permute(0, 2, 3, 1), 2)
        return _pack(codes).permute(0, 2, 1, 3).flatten(1), scales.flatten(1)

    def decode_k(
        self, codes: Tensor, scales: Tensor, shape: Shape, to: torch.dtype, scale: float | None = None
    ) -> Tensor:
        import torch

        grid = codes.view(-1, shape.kv_heads, shape.head_dim // 2, shape.block_size).permute(0, 3, 1, 2)
        both = scales.view(-1, shape.kv_heads, 2, shape.head_dim).unsqueeze(1)
        s, z = _e5m3(both[..., 0, :]), both[..., 1, :].view(torch.int8)
        return (_unpack(grid).to(to) - z.to(to)) * s.to(to)

    def decode_v(
        self, codes: Tensor, scales: Tensor, shape: Shape, to: torch.dtype, scale: float | None = None
    ) -> Tensor:
        import torch

        grid = codes.view(-1, shape.kv_heads, shape.block_size, shape.head_dim // 2).permute(0, 2, 1, 3)
        values = _unpack(grid).to(to)
        both = scales.view(-1, shape.kv_heads, 2, value_groups(shape.head_dim), shape.block_size).permute(2, 0, 4, 1, 3)
        group = self._group_of(values)
        s, z = _e5m3(both[0][..., group]), both[1].contiguous().view(torch.int8)[..., group]
        return (values - z.to(to)) * s.to(to)

    def bound_k(self, x: Tensor, scale: float | None = None) -> Tensor:
        return _e5m3(_quantise(*x.float().aminmax(dim=1, keepdim=True))[0]).to(x.dtype) / 2

    def bound_v(self, x: Tensor, scale: float | None = None) -> Tensor:
        return _e5m3(self._value_scales(x)[0])[..., self._group_of(x)].to(x.dtype) / 2

    @staticmethod
    def _codes(x: Tensor, byte: Tensor, zero: Tensor) -> Tensor:
        import torch

        return ((x.float() / _e5m3(byte)).round() + zero).clamp(0, 15).to(torch.int32)

    @staticmethod
    def _group_of(x: Tensor) -> Tensor:
        """Group of each channel."""
        import torch

        half = x.shape[-1] // 2
        channel = torch.arange(x.shape[-1], device=x.device)
        return (channel // half) * (value_groups(x.shape[-1]) // 2) + channel % half // GROUP

    def _value_scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale bytes and zeros [n, block_size, kv_heads, groups]."""
        import torch

        group = self._group_of(x)
        ranges = [x.float()[..., group == g].aminmax(dim=-1) for g in range(value_groups(x.shape[-1]))]
        low = torch.stack([r.min for r in ranges], dim=-1)
        return _quantise(low, torch.stack([r.max for r in ranges], dim=-1))


FORMAT = Int4()
