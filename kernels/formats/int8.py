"""`int8`: symmetric int8 (-127..127), one scale per token and KV head.

Byte format: K codes [kv_heads, head_dim, block_size] and V codes [kv_heads, block_size, head_dim], one byte each;
scales fp16 [kv_heads, block_size] on both sides, s = fp16_up(max|x| / top); x = s * code.
"""

from __future__ import annotations

from kernels.formats._codes import INT8
from kernels.formats._per_token import PerTokenHead

FORMAT = PerTokenHead("int8", INT8)
