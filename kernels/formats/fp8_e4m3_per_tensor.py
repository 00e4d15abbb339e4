"""`fp8_e4m3_per_tensor`: OCP e4m3fn (top 448), one scale per layer and side.

Byte format: K codes [kv_heads, head_dim, block_size] and V codes [kv_heads, block_size, head_dim], one byte each; no
scales in the page; x = scale[layer, side] * code, scales from `kv_scales_path`.
"""

from __future__ import annotations

from kernels.formats._codes import E4M3
from kernels.formats._per_tensor import PerTensor

FORMAT = PerTensor("fp8_e4m3_per_tensor", E4M3)
