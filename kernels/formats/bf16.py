"""`bf16`: raw bfloat16 elements, no scales. K [kv_heads, head_dim, block_size], V [kv_heads, block_size, head_dim]."""

from __future__ import annotations

from kernels.formats._raw import Raw

FORMAT = Raw("bf16", "bfloat16", width=2, epsilon=2**-8, smallest=2**-133)
