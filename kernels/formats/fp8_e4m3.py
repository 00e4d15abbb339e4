"""`fp8_e4m3`: OCP e4m3fn (top 448), one scale per token and KV head.

Byte format: K codes [kv_heads, head_dim, block_size] and V codes [kv_heads, block_size, head_dim], one byte each;
scales fp16 [kv_heads, block_size] on both sides, s = fp16_up(max|x| / top); x = s * code.
"""

from __future__ import annotations

from kernels.formats._codes import E4M3
from kernels.formats._per_token import PerTokenHead

FORMAT = PerTokenHead("fp8_e4m3", E4M3)
