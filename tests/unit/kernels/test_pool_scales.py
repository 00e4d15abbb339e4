"""`clipped_fraction`: what saturates under the scales of a pool is counted, where a scale can saturate at all."""

from __future__ import annotations

import torch

from kernels.dispatch import select
from kernels.layout import PageLayout, page_layout
from kernels.scale_file import ScaleFile
from kernels.scales import PoolScales

PER_TENSOR = page_layout("int8_per_tensor", "fp8_e4m3_per_tensor", 16, 3, 1, 64)


def scales(k: tuple[float, ...], v: tuple[float, ...], layout: PageLayout) -> PoolScales:
    return PoolScales(ScaleFile(k, v), layout)


def test_what_saturates_is_counted_per_side() -> None:
    pool = scales((9.0, 1.0, 9.0), (9.0, 1.0, 9.0), PER_TENSOR)
    assert pool.tensor.tolist() == [[9.0, 9.0], [1.0, 1.0], [9.0, 9.0]]
    assert pool.clipped_fraction == 0
    pool.count(1, torch.tensor([1.0, -1.0, 127.0, 128.0]), torch.tensor([448.0, 449.0, -449.0, 0.0]))
    assert pool.clipped_fraction == 3 / 8
    pool.count(0, torch.zeros(8), torch.zeros(0))
    assert pool.clipped_fraction == 3 / 16
    pool.reset()
    assert pool.clipped_fraction == 0


def test_full_tails_are_counted_where_a_scale_outlives_the_page() -> None:
    layout = page_layout("int8_per_tensor", "bf16", 16, 3, 1, 64, skip_layers=(2,))
    tails = torch.zeros(4, layout.tail_bytes, dtype=torch.uint8)
    big = torch.full((16, 1, 64), 1000.0, dtype=torch.bfloat16)
    slots, positions = torch.full((16,), 3, dtype=torch.int32), torch.arange(16, dtype=torch.int32)
    for layer in range(3):
        select("cpu").append_tails(tails, layout, layer, big, big, slots, positions)
    pool = scales((1.0, 100.0, 1.0), (1.0, 1.0, 1.0), layout)
    pool.count_tails(tails, torch.tensor([0, 3], dtype=torch.int32))
    assert (pool.clipped, pool.stored) == (1024, 2 * 2 * 1024), "K of layers 0 and 1 only; layer 2 is skipped"
    pool.count(2, torch.full((4,), 1e6), torch.full((4,), 1e6))
    assert pool.stored == 2 * 2 * 1024
