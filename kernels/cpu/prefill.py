"""Attention of prompt chunks: the context is decoded once per chunk and layer, then torch's flash kernel does the
rest."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import Batch
from kernels.cpu import geometry
from kernels.cpu.gather import gather_into
from kernels.layout import PageLayout
from kernels.reference._pages import tail_views

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prefill(
    q: Tensor,
    pages: Tensor,
    tails: Tensor,
    layout: PageLayout,
    layer: int,
    batch: Batch,
    scale: float,
    window: int,
    softcap: float,
    scales: Tensor | None,
    out: Tensor,
) -> Tensor:
    """`attend` for any number of queries per sequence; writes and returns out."""
    starts = batch.query_starts.tolist()
    counts, lengths, slots = batch.page_counts.tolist(), batch.tail_lengths.tolist(), batch.tail_slots.tolist()
    for b in range(len(batch)):
        rows = slice(starts[b], starts[b + 1])
        if starts[b + 1] == starts[b]:
            continue
        count, filled = counts[b], lengths[b]
        sealed = count * layout.block_size
        # [tokens, kv_heads, head_dim] over memory [kv_heads, tokens, head_dim], as the flash kernel reads it
        k, v = torch.empty(2, layout.kv_heads, sealed + filled, layout.head_dim, dtype=q.dtype).transpose(1, 2)
        ids = geometry.ids(batch.tables[b, :count])
        gather_into(pages, layout, layer, ids, k, v, scales)
        if filled:
            tail_k, tail_v = tail_views(tails, layout, layer)
            k[sealed:] = tail_k[slots[b], :, :filled].transpose(0, 1)
            v[sealed:] = tail_v[slots[b], :, :filled].transpose(0, 1)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if softcap:
            _masked(q[rows], k, v, scale, window, softcap, out[rows])
        else:
            _chunk(q[rows], k, v, scale, window, out[rows])
    return out


def _chunk(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, out: Tensor) -> None:
    """q [m, q_heads, d] at the last positions of k, v [kv_heads, n, d]: earlier keys without a mask and with the
    group
    folded into rows, the chunk itself causal; merged by log-sum-exp."""
    m, heads, dim = q.shape
    kv_heads, n, _ = k.shape
    past = n - m
    group = heads // kv_heads
    by_head = q.transpose(0, 1)  # [q_heads, m, d]
    if window:
        position = torch.arange(past, n).unsqueeze(1)
        key = torch.arange(n)
        seen = (key <= position) & (key > position - window)
        first = max(0, past - window + 1)
        mask = torch.zeros(m, n - first).masked_fill_(~seen[:, first:], float("-inf")).to(q.dtype)
        wide_k, wide_v = (x[:, first:].repeat_interleave(group, dim=0).unsqueeze(0) for x in (k, v))
        o, _ = _flash(by_head.unsqueeze(0), wide_k, wide_v, 0.0, False, attn_mask=mask[None, None], scale=scale)
        out.copy_(o[0].transpose(0, 1))
        return
    now_k, now_v = (x[:, past:].repeat_interleave(group, dim=0).unsqueeze(0) for x in (k, v))
    o, lse = _flash(by_head.unsqueeze(0), now_k, now_v, 0.0, True, scale=scale)
    if not past:
        out.copy_(o[0].transpose(0, 1))
        return
    folded = by_head.reshape(1, kv_heads, group * m, dim)
    before, before_lse = _flash(folded, k[None, :, :past], v[None, :, :past], 0.0, False, scale=scale)
    lse, before_lse = lse.reshape(heads, m, 1), before_lse.reshape(heads, m, 1)
    weight = torch.sigmoid(lse - before_lse)
    merged = torch.lerp(before.reshape(heads, m, dim).float(), o[0].float(), weight.float())
    out.copy_(merged.transpose(0, 1))


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, out: Tensor) -> None:
    """The same with a soft cap, which the flash kernel does not know; blocks of queries bound the memory of
    logits."""
    m, heads, dim = q.shape
    kv_heads, n, _ = k.shape
    for start in range(0, m, 64):
        block = q[start : start + 64]
        rows = block.shape[0]
        folded = block.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).flatten(1, 2).float()
        logits = softcap * torch.tanh(torch.bmm(folded, k.float().transpose(1, 2)) * (scale / softcap))
        position = torch.arange(n - m + start, n - m + start + rows).unsqueeze(1)
        key = torch.arange(n)
        hidden = (key > position) | ((key <= position - window) if window else torch.zeros((), dtype=torch.bool))
        grid = logits.view(kv_heads, heads // kv_heads, rows, n).masked_fill_(hidden, float("-inf"))
        weighted = torch.bmm(grid.softmax(dim=-1).view_as(logits), v.float())
        out[start : start + rows] = weighted.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
