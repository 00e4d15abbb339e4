"""`fp16`: raw IEEE half elements, no scales. K [kv_heads, head_dim, block_size], V [kv_heads, block_size, head_dim]."""

from __future__ import annotations

from kernels.formats._raw import Raw

FORMAT = Raw("fp16", "float16", width=2, epsilon=2**-11, smallest=2**-24)
