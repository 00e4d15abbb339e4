"""`fp32`: raw IEEE floats, no scales. K [kv_heads, head_dim, block_size], V [kv_heads, block_size, head_dim]."""

from __future__ import annotations

from kernels.formats._raw import Raw

FORMAT = Raw("fp32", "float32", width=4, epsilon=0.0, smallest=0.0)
