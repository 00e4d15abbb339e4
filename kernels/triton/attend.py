"""Paged attention in Triton: decode and prompt chunks, all KV formats, split over the pages of a sequence.

A program takes the query rows of one KV head (rows x group, at least 16 for the tensor cores), runs over its share of
the sequence's pages with an online softmax in base 2, and over the tail if its share is the last. With more than one
share the partial results are merged by their log-sum-exp. Lengths are read on the device and the grid depends on
`max_pages`, `max_query` and the shapes of `shared` only, so a decode step can be captured in a CUDA graph.

Pages that sequences share are the same kernel with other rows and another table: first the pages a group has in common,
for the rows of all its members at once, then what each sequence has behind them, then the same merge.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Batch, check
from kernels.layout import PageLayout
from kernels.triton._formats import RAW_TYPES, TORCH_TYPES, constants, dot_type, side
from kernels.triton._keys import centres, load_keys, product, scores
from kernels.triton._launch import INTERPRETED
from kernels.triton._passes import passes_of
from kernels.triton._softmax import fold, logits, page_lse_of
from kernels.triton._values import load_values, weighted
from kernels.triton.merge import merge_splits
from kernels.triton.tuning import TileShape


# numbers that differ between calls: one binary for all of them
@triton.jit(do_not_specialize=("table_row", "lse_row", "layer", "parts", "first_part"))
def attend_kernel(
    q, out, part, lse, pages, tails, tables, counts, tail_slots, tail_lengths, query_starts, page_lse, scales,
    members, first_pages,
    q_row, q_head, out_row, out_head, table_row, table_head, count_row, count_head, lse_row, lse_head,
    layer, layer_offset, tail_offset, scale, softcap, window, parts, first_part,
    PAGE_BYTES: tl.constexpr, K_SCALES: tl.constexpr, V_CODES: tl.constexpr, V_SCALES: tl.constexpr,
    K_CODE: tl.constexpr, K_GRAIN: tl.constexpr, K_RAW: tl.constexpr,
    V_CODE: tl.constexpr, V_GRAIN: tl.constexpr, V_RAW: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr, TAIL_BYTES: tl.constexpr, TAIL_V: tl.constexpr, TAIL_RAW: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    K_DOT: tl.constexpr, V_DOT: tl.constexpr, TAIL_DOT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE_LSE: tl.constexpr,
    TOGETHER: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, B * KV_HEADS, SPLITS). `part`, `lse` take the result if SPLITS > 1, else `out`.

    Shared pages take two launches, which share `part` and `lse`: `parts` a row, from `first_part` on.
    TOGETHER: a "sequence" is a group. `query_starts` and `counts` are those of groups, its queries stand in the rows
    `members` names, its table is that of the first of them, and there is no tail.
    REST: a sequence from its page `first_pages` on. If that is 0, no group has it, and the parts before are empty.
    Positions do not matter in these two, which know neither causality nor windows.
    """
    sequence = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    # three TF32 products for a chunk of fp32; one query takes fewer registers without tensor cores
    fp32: tl.constexpr = "tf32x3" if CAUSAL else "ieee"
    first_row = tl.load(query_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_row
    rows_per_tile: tl.constexpr = BLOCK_M // GROUP
    first_query = tl.program_id(0) * rows_per_tile
    if first_query < queries:
        count = tl.load(counts + sequence * count_row + head * count_head)
        filled = 0
        if REST:
            skipped = tl.load(first_pages + sequence)
            count -= skipped
            tables += skipped
        if not TOGETHER:
            filled = tl.load(tail_lengths + sequence)
        m_range = tl.arange(0, BLOCK_M)
        query = first_query + m_range // GROUP
        q_heads = head * GROUP + m_range % GROUP
        live = (query < queries) & (m_range < rows_per_tile * GROUP)
        start = count * BLOCK_SIZE + filled - queries
        position = start + query
        half: tl.constexpr = HEAD_DIM // 2
        d = tl.arange(0, HALF_PAD)
        inside_d = d < half
        inside = live[:, None] & inside_d[None, :]
        row, reader = first_row + query, sequence
        if TOGETHER:
            row, reader = tl.load(members + row, mask=live, other=0), tl.load(members + first_row)
        row = row.to(tl.int64)
        source = q + (row * q_row + q_heads * q_head)[:, None] + d[None, :]
        q_low = tl.load(source, mask=inside, other=0.0)
        q_high = tl.load(source + half, mask=inside, other=0.0)
        k_low, k_high = q_low.to(K_DOT), q_high.to(K_DOT)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc_low = tl.zeros([BLOCK_M, HALF_PAD], tl.float32)
        acc_high = tl.zeros([BLOCK_M, HALF_PAD], tl.float32)
        k_scale, v_scale = 1.0, 1.0
        if K_GRAIN == 2:
            k_scale = tl.load(scales + layer * 2)
        if V_GRAIN == 2:
            v_scale = tl.load(scales + layer * 2 + 1)

        # shares are whole tiles, so that splits never cut a tile
        tile_pages: tl.constexpr = BLOCK_N // BLOCK_SIZE
        share = tl.cdiv(tl.cdiv(count, tile_pages), SPLITS) * tile_pages
        low, high = split * share, tl.minimum(split * share + share, count)
        if CAUSAL:
            high = tl.minimum(high, (start + tl.minimum(first_query + rows_per_tile, queries) - 1) // BLOCK_SIZE + 1)
        if WINDOW:
            oldest = tl.maximum(start + first_query - window + 1, 0)
            low = tl.maximum(low, oldest // BLOCK_SIZE // tile_pages * tile_pages)
        n = tl.arange(0, BLOCK_N)
        slot = n % BLOCK_SIZE
        column = tl.arange(0, tile_pages)
        table = tables + reader * table_row + head * table_head
        origin = pages + layer_offset
        for page in range(low, high, tile_pages):
            page_there = page + column < high
            page_base = origin + tl.load(table + page + column, mask=page_there, other=0).to(tl.int64) * PAGE_BYTES
            there = page + n // BLOCK_SIZE < high
            base = origin + tl.load(table + page + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64) * PAGE_BYTES
            # both sides before the first barrier, so that all of the tile is on its way at once
            keys = load_keys(page_base, head, page_there, K_CODE, K_RAW, HEAD_DIM, HALF_PAD, BLOCK_SIZE)
            values = load_values(
                base, head, slot, there, V_CODE, V_RAW, V_CODES, HEAD_DIM, HALF_PAD, BLOCK_SIZE, GROUPS
            )
            raw = scores(k_low, k_high, keys[0], keys[1], page_base, head, page_there, k_scale, K_CODE, K_GRAIN,
                         K_SCALES, HEAD_DIM, HALF_PAD, BLOCK_SIZE, tile_pages, K_DOT, fp32)  # fmt: skip
            if K_GRAIN == 1 and K_CODE != 4:
                centre = centres(q_low.to(tl.float32), q_high.to(tl.float32), pages, table, page, high, head,
                                 layer_offset, PAGE_BYTES, K_SCALES, HEAD_DIM, HALF_PAD, tile_pages,
                                 BLOCK_M)  # fmt: skip
                raw = tl.reshape(tl.reshape(raw, [BLOCK_M, tile_pages, BLOCK_SIZE]) + centre[:, :, None], raw.shape)
            seen = there[None, :] & live[:, None]
            key = page * BLOCK_SIZE + n
            if CAUSAL:
                seen &= key[None, :] <= position[:, None]
            if WINDOW:
                seen &= key[None, :] > (position - window)[:, None]
            x = tl.where(seen, logits(raw, scale, softcap, SOFTCAP), float("-inf"))
            if PAGE_LSE:
                by_page = page_lse_of(x, tile_pages, BLOCK_SIZE)
            top, total, shrink, p = fold(x, top, total)
            acc_low, acc_high = weighted(
                p, shrink, acc_low, acc_high, values[0], values[1], base, head, slot, there, v_scale, V_CODE, V_GRAIN,
                V_SCALES, HALF_PAD, BLOCK_SIZE, GROUPS, BLOCK_N, V_DOT, fp32,
            )  # fmt: skip
            if PAGE_LSE:
                # only now: no load may pass a store, and to hold what was loaded takes registers
                target = page_lse + (sequence * lse_row + q_heads * lse_head)[:, None] + (page + column)[None, :]
                tl.store(target, by_page, mask=live[:, None] & page_there[None, :])

        if (split == SPLITS - 1) & (filled > 0):
            t = tl.arange(0, BLOCK_SIZE)
            there = t < filled
            own = tails + tl.load(tail_slots + sequence).to(tl.int64) * TAIL_BYTES + tail_offset
            typed = own.to(tl.pointer_type(TAIL_RAW)) + head * (BLOCK_SIZE * HEAD_DIM)
            k_place = typed + t[None, :] * HEAD_DIM + d[:, None]
            wanted = inside_d[:, None] & there[None, :]
            raw = tl.zeros([BLOCK_M, BLOCK_SIZE], tl.float32)
            raw = product(q_low.to(TAIL_DOT), tl.load(k_place, mask=wanted, other=0.0).to(TAIL_DOT), raw, fp32)
            raw = product(q_high.to(TAIL_DOT), tl.load(k_place + half, mask=wanted, other=0.0).to(TAIL_DOT), raw, fp32)
            seen = there[None, :] & live[:, None]
            key = count * BLOCK_SIZE + t
            if CAUSAL:
                seen &= key[None, :] <= position[:, None]
            if WINDOW:
                seen &= key[None, :] > (position - window)[:, None]
            x = tl.where(seen, logits(raw, scale, softcap, SOFTCAP), float("-inf"))
            top, total, shrink, p = fold(x, top, total)
            typed = (own + TAIL_V).to(tl.pointer_type(TAIL_RAW)) + head * (BLOCK_SIZE * HEAD_DIM)
            v_place = typed + t[:, None] * HEAD_DIM + d[None, :]
            wanted = there[:, None] & inside_d[None, :]
            weights = p.to(TAIL_DOT)
            value = tl.load(v_place, mask=wanted, other=0.0).to(TAIL_DOT)
            acc_low = tl.dot(weights, value, acc=acc_low * shrink[:, None], input_precision=fp32)
            value = tl.load(v_place + half, mask=wanted, other=0.0).to(TAIL_DOT)
            acc_high = tl.dot(weights, value, acc=acc_high * shrink[:, None], input_precision=fp32)

        norm = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
        if SPLITS == 1 and not TOGETHER and not REST:
            target = out + (row * out_row + q_heads * out_head)[:, None] + d[None, :]
            tl.store(target, (acc_low * norm).to(out.dtype.element_ty), mask=inside)
            tl.store(target + half, (acc_high * norm).to(out.dtype.element_ty), mask=inside)
        else:
            if TOGETHER:
                # read again rather than kept, which would cost registers in the loop; volatile, or it would be kept
                row = tl.load(members + first_row + query, mask=live, other=0, volatile=True).to(tl.int64)
            flat = row * (KV_HEADS * GROUP) + q_heads
            if TOGETHER or REST:
                flat = flat * parts + first_part + split
            else:
                flat = flat * SPLITS + split
            target = part + flat[:, None] * HEAD_DIM + d[None, :]
            tl.store(target, acc_low * norm, mask=inside)
            tl.store(target + half, acc_high * norm, mask=inside)
            tl.store(lse + flat, tl.where(total == 0.0, float("-inf"), top + tl.log2(total)), mask=live)
            if REST:
                # likewise
                empty = tl.where((split == 0) & (tl.load(first_pages + sequence, volatile=True) == 0), first_part, 0)
                for before in range(1, empty + 1):
                    tl.store(lse + flat - before, float("-inf"), mask=live)


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
    splits: int = 0,
    shape: TileShape | None = None,
) -> Tensor:
    """The contract of `kernels.reference.attend`. `splits` > 0 fixes the shares a sequence is cut into, `shape` tiles.

    Nothing here waits for the device, and grid and constants depend on shapes, `max_pages` and `max_query` alone.
    """
    check(batch, q, layout.kv_heads, layout.head_dim, window, page_lse)
    place = layout.layer(layer)
    k_side, v_side = side(place.k_format, keys=True), side(place.v_format, keys=False)
    place.check_scales(scales is not None)
    out = torch.empty_like(q) if out is None else out
    rows, q_heads, head_dim = q.shape
    group = q_heads // layout.kv_heads
    sparse = batch.kv_head_tables is not None
    tables = batch.kv_head_tables if sparse else batch.tables
    passes = passes_of(batch, layout, place, group, q.device, splits, shape)
    parts = sum(one.splits for one in passes)
    part = lse = out
    if parts > 1:
        part = torch.empty((rows, q_heads, parts, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, q_heads, parts), dtype=torch.float32, device=q.device)
    if page_lse is not None:
        page_lse.fill_(float("-inf"))
    seen_lse = page_lse if page_lse is not None else out
    tail_type = TORCH_TYPES[layout.tail_format]
    tail_dot = tl.float32 if INTERPRETED or q.dtype == torch.float32 else RAW_TYPES[layout.tail_format]
    first_part = 0
    for one in passes:
        attend_kernel[(one.tiles, one.sequences * layout.kv_heads, one.splits)](
            q, out, part, lse, pages, tails, tables, one.counts, batch.tail_slots, batch.tail_lengths, one.starts,
            seen_lse, scales if scales is not None else out, one.members, one.first_pages,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            tables.stride(0), tables.stride(1) if sparse else 0,
            one.counts.stride(0), one.counts.stride(1) if sparse else 0, seen_lse.stride(0), seen_lse.stride(1),
            layer, place.offset, place.tail_k, scale, softcap, window, parts, first_part,
            **constants(layout, place),
            TAIL_BYTES=layout.tail_bytes, TAIL_V=place.tail_v - place.tail_k, TAIL_RAW=RAW_TYPES[layout.tail_format],
            GROUP=group, BLOCK_M=one.shape.rows, BLOCK_N=one.shape.tokens, SPLITS=one.splits,
            K_DOT=dot_type(k_side, tail_type, INTERPRETED), V_DOT=dot_type(v_side, tail_type, INTERPRETED),
            TAIL_DOT=tail_dot, CAUSAL=batch.max_query > 1, WINDOW=window > 0, SOFTCAP=softcap > 0,
            PAGE_LSE=page_lse is not None, TOGETHER=one.together, REST=one.rest,
            num_warps=one.shape.warps, num_stages=one.shape.stages, maxnreg=one.shape.registers, enable_fp_fusion=True,
        )  # fmt: skip
        first_part += one.splits
    if parts > 1:
        merge_splits(part, lse, out)
    return out
