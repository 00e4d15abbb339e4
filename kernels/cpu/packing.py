"""Rearranges weights into the panels of `linear.c`, which describes the bytes."""

from __future__ import annotations

import torch

F32, BF16, Q8, Q4 = range(4)
GROUP = 32
"""Inputs that share a scale; `in` must be a multiple of it."""
GROUP_BYTES = {F32: 2048, BF16: 1024, Q8: 576, Q4: 320}


def panels(out: int, gated: bool = False) -> int:
    """Panels of a weight with `out` rows."""
    return -(-(out // 2) // 16) if gated else -(-out // 32)


def packed_shape(format: int, out: int, columns: int, gated: bool = False) -> tuple[int, int]:
    """Shape of the packed uint8 tensor: [panels, bytes of a panel]."""
    return panels(out, gated), columns // GROUP * 2 * GROUP_BYTES[format]


def _blocks(rows: torch.Tensor, gated: bool) -> torch.Tensor:
    """[out, n] → [panels, 2, 16, n], zeros behind the last row; a gated weight pairs 16 gates with their 16 ups."""
    if gated:
        half = rows.shape[0] // 2
        gates, ups = _padded(rows[:half], 16), _padded(rows[half:], 16)
        return torch.stack((gates.unflatten(0, (-1, 16)), ups.unflatten(0, (-1, 16))), dim=1)
    return _padded(rows, 32).unflatten(0, (-1, 2, 16))


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -rows.shape[0] % multiple
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def _bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Joins parts [panels, groups, 2, …] byte-wise into [panels, bytes]."""
    flat = [part.contiguous().flatten(3).view(torch.uint8) for part in parts]
    return torch.cat(flat, dim=3).flatten(1)


def pack_dense(weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """float32 or bfloat16 [out, in] → packed f32 or bf16."""
    blocks = _blocks(weight, gated)
    if weight.dtype == torch.float32:
        return _bytes(blocks.unflatten(3, (-1, GROUP)).permute(0, 3, 1, 4, 2))
    return _bytes(blocks.unflatten(3, (-1, 16, 2)).permute(0, 3, 1, 4, 2, 5))


def pack_q8(codes: torch.Tensor, scales: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """int8 codes [out, in] and float16 scales [out, in/32] → packed q8."""
    blocks = _blocks(codes, gated).unflatten(3, (-1, 16, 2)).permute(0, 3, 1, 4, 2, 5)
    return _bytes(_blocks(scales.float(), gated).permute(0, 3, 1, 2), blocks)


def pack_q4(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """uint8 codes [out, in/2] (low nibble first), float16 scales and minima [out, in/32] → packed q4."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).to(torch.int32)
    blocks = _blocks(nibbles, gated).unflatten(3, (-1, 4, 4, 2))  # [panels, 2, 16, groups, step, nibble, word]
    words = (blocks << (4 * torch.arange(4, dtype=torch.int32))[:, None]).sum(5, dtype=torch.int32)
    words = words.permute(0, 3, 1, 4, 2, 5).to(torch.int16)
    side = [_blocks(x, gated).permute(0, 3, 1, 2) for x in (scales, minima)]
    return _bytes(*side, words)
