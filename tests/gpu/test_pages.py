"""Kernels that write and read whole pages: their bytes are those of the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.layout import page_layout, parse_kv_cache_dtype
from kernels.reference import gather as reference_gather
from kernels.reference import seal as reference_seal
from kernels.reference import tails as reference_tails
from kernels.triton.gather import copy_pages, gather
from kernels.triton.seal import seal, seal_tails
from kernels.triton.tails import append_tails
from tests.gpu.test_attend import FORMATS
from tests.support.paged import DTYPES, POISON, SCALES, i32, keys_and_values

SHAPES = [("fp32", 64, 16, ()), ("bf16", 80, 32, (0,)), ("fp16", 160, 16, (1,))]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("compute", "head_dim", "block_size", "skip"), SHAPES)
def test_seal_and_gather(
    name: str, compute: str, head_dim: int, block_size: int, skip: tuple[int, ...], device: torch.device
) -> None:
    layout = page_layout(
        *parse_kv_cache_dtype(name, compute=compute), block_size, 2, 2, head_dim, skip, tail_format=compute
    )
    ours = torch.full((6, layout.page_bytes), POISON, dtype=torch.uint8, device=device)
    exact = ours.cpu().clone()
    ids, scales = i32([4, 1]), SCALES.to(device)
    for layer in range(2):
        k, v = keys_and_values(layout, 2 * block_size, torch.Generator().manual_seed(layer))
        k[: block_size // 2, 0] = 0
        v[1] = 0
        reference_seal.seal(exact, layout, layer, k, v, ids, SCALES)
        seal(ours, layout, layer, k.to(device), v.to(device), ids.to(device), scales)
        wide = reference_gather.gather(exact, layout, layer, ids, dtype=torch.float32, scales=SCALES)
        found = gather(ours, layout, layer, ids.to(device), dtype=torch.float32, scales=scales)
        for one, other in zip(found, wide, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=0)
    assert torch.equal(ours.cpu(), exact)


@pytest.mark.parametrize("name", ["fp32", "int8", "int8_channel", "int4"])
def test_tails_to_pages(name: str, device: torch.device) -> None:
    layout = page_layout(*parse_kv_cache_dtype(name), 16, 2, 2, 64, tail_format="bf16")
    tails = torch.full((4, layout.tail_bytes), POISON, dtype=torch.uint8, device=device)
    exact_tails = tails.cpu().clone()
    slots = i32([2] * 16 + [0] * 16)
    positions = torch.arange(16, dtype=torch.int32).flip(0).repeat(2)
    for layer in range(2):
        k, v = keys_and_values(layout, 32, torch.Generator().manual_seed(layer))
        reference_tails.append_tails(exact_tails, layout, layer, k, v, slots, positions)
        # as the model has them: slices of one fused projection
        fused = torch.cat((k, v), dim=1).to(device)
        append_tails(tails, layout, layer, fused[:, :2], fused[:, 2:], slots.to(device), positions.to(device))
    assert torch.equal(tails.cpu(), exact_tails)
    ours = torch.full((6, layout.page_bytes), POISON, dtype=torch.uint8, device=device)
    exact = ours.cpu().clone()
    reference_seal.seal_tails(exact, exact_tails, layout, i32([2, 0]), i32([5, 1]))
    seal_tails(ours, tails, layout, i32([2, 0]).to(device), i32([5, 1]).to(device))
    assert torch.equal(ours.cpu(), exact)


def test_copies_of_pages(device: torch.device) -> None:
    source = torch.randint(0, 256, (5, 4096), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_pages(source, target, i32([4, 0]).to(device), i32([1, 3]).to(device))
    assert torch.equal(target[[1, 3]], source[[4, 0]])
    assert not target[[0, 2, 4]].any()


@pytest.mark.parametrize("compute", DTYPES)
def test_appending_nothing(compute: str, device: torch.device) -> None:
    layout = page_layout(compute, compute, 16, 2, 2, 64, tail_format=compute)
    tails = torch.full((2, layout.tail_bytes), POISON, dtype=torch.uint8, device=device)
    empty = torch.empty((0, 2, 64), dtype=DTYPES[compute], device=device)
    append_tails(tails, layout, 0, empty, empty, i32([]).to(device), i32([]).to(device))
    assert (tails == POISON).all()
