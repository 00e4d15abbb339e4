"""How much of a pool admission leaves alone, and what that means for the longest sequence."""

from __future__ import annotations

import math


def base_reserve(blocks: int) -> int:
    """Pages that admission always leaves free: 1 % of the pool, at least 2."""
    return max(2, math.ceil(blocks / 100))


def longest(blocks: int, block_size: int) -> int:
    """Tokens of the longest sequence a pool of `blocks` pages can always finish; 0 if it is too small for any."""
    return max(0, blocks - base_reserve(blocks)) * block_size
