"""From scores to weights: logits in base 2, the online softmax over tiles, the log-sum-exp of pages."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(x, top, total):
    """Online softmax over logits x [M, N] in base 2: new maximum, new sum, what old results shrink by, weights."""
    new = tl.maximum(top, tl.max(x, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(x - safe[:, None])
    shrink = tl.exp2(top - safe)
    return new, total * shrink + tl.sum(weights, axis=1), shrink, weights


@triton.jit
def logits(raw, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits of q.k."""
    x = raw * scale
    if SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        x = softcap * (2.0 * tl.sigmoid(2.0 * (x / softcap)) - 1.0)
    return x * 1.4426950408889634


@triton.jit
def page_lse_of(x, TILE_PAGES: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """[M, TILE_PAGES] natural log-sum-exp of each page of base-2 logits x [M, N]."""
    by_page = tl.reshape(x, [x.shape[0], TILE_PAGES, BLOCK_SIZE])
    top = tl.max(by_page, axis=2)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(by_page - safe[:, :, None]), axis=2)
    return (safe + tl.log2(total)) * 0.6931471805599453
