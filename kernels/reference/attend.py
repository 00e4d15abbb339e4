"""Attention over sealed pages and tails: the oracle. Run it with `compute=torch.float64` to judge another backend."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import Batch, check
from kernels.layout import PageLayout
from kernels.reference._pages import decode_layer, tail_views


def attend(
    q: Tensor,
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    scales: Tensor | None = None,
    page_lse: Tensor | None = None,
    out: Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """Causal attention of q [T, q_heads, head_dim] over each sequence's pages and tail; returns out like q.

    Query head h reads KV head h // (q_heads / kv_heads). A query at position p sees keys p - window + 1 .. p (all up to
    p if window is 0). Logits are `scale * q.k`, then `softcap * tanh(logit / softcap)` if softcap > 0.
    `page_lse` fp32 [B, q_heads, max_pages] receives the log-sum-exp of each page's logits, -inf beyond the table.
    Raises ValueError for what `kernels.attention.check` refuses.
    """
    shape = layout.shape
    check(batch, q, shape.kv_heads, shape.head_dim, window, page_lse)
    out = torch.empty_like(q) if out is None else out
    tail_k, tail_v = tail_views(tails, layout, layer)
    group = q.shape[1] // shape.kv_heads
    starts = batch.query_starts.tolist()
    if page_lse is not None:
        page_lse.fill_(float("-inf"))

    for b in range(len(batch)):
        rows = slice(starts[b], starts[b + 1])
        filled, slot = int(batch.tail_lengths[b]), int(batch.tail_slots[b])
        for head in range(shape.kv_heads):
            if batch.kv_head_tables is not None and batch.kv_head_counts is not None:
                ids = batch.kv_head_tables[b, head, : int(batch.kv_head_counts[b, head])]
            else:
                ids = batch.tables[b, : int(batch.page_counts[b])]
            k, v = (side[:, :, head].flatten(0, 1) for side in decode_layer(pages, layout, layer, ids, compute, scales))
            if filled:
                k = torch.cat((k, tail_k[slot, head, :filled].to(compute)))
                v = torch.cat((v, tail_v[slot, head, :filled].to(compute)))
            heads = slice(head * group, (head + 1) * group)
            logits = torch.einsum("qgd,kd->gqk", q[rows, heads].to(compute), k) * scale
            if softcap > 0:
                logits = softcap * torch.tanh(logits / softcap)
            count, queries = k.shape[0], starts[b + 1] - starts[b]
            position = torch.arange(count - queries, count, device=q.device).unsqueeze(1)
            key = torch.arange(count, device=q.device)
            hidden = key > position
            if window:
                hidden |= key <= position - window
            logits = logits.masked_fill(hidden, float("-inf"))
            out[rows, heads] = torch.einsum("gqk,kd->qgd", logits.softmax(dim=-1), v).to(out.dtype)
            if page_lse is not None and len(ids):
                sealed = logits[:, 0, : len(ids) * shape.block_size].unflatten(-1, (len(ids), shape.block_size))
                page_lse[b, heads, : len(ids)] = sealed.logsumexp(dim=-1).float()
    return out
