"""Scales that outlive a page: how they are learned, and that writer and reader use the same."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import select
from kernels.layout import page_layout
from kernels.scales import Calibrator, top
from tests.support import kv_cases

LAYOUT = page_layout("int8_per_tensor", "fp8_e4m3_per_tensor", 16, 3, 1, 64)


def clipped(x: torch.Tensor, scale: float, name: str) -> float:
    """Share of elements that saturate."""
    return float((x.abs() > scale * top(name)).float().mean())


@pytest.mark.parametrize("policy", ["max", "smoothed_max"])
def test_zeros_first_then_outliers_never_clips(policy: str) -> None:
    calibrator = Calibrator(LAYOUT, policy)
    spike = torch.full((32, 1, 64), 50.0)
    for batch in (torch.zeros(32, 1, 64), torch.randn(32, 1, 64), spike, -spike):
        for layer in range(3):
            calibrator.observe(layer, batch, 2 * batch)
        if batch.any():
            scales = calibrator.scales()
            assert clipped(batch, float(scales[0, 0]), "int8_per_tensor") == 0
            assert clipped(2 * batch, float(scales[0, 1]), "fp8_e4m3_per_tensor") == 0
    assert torch.allclose(calibrator.scales(), torch.tensor([50 / 127, 100 / 448]).expand(3, 2))


def test_the_peak_itself_never_clips() -> None:
    """Division rounds: a peak over the top, times the top, can be less than the peak."""
    layout = page_layout("int8_per_tensor", "fp8_e4m3_per_tensor", 16, 400, 1, 64)
    calibrator, peaks = Calibrator(layout), torch.rand(400) + 0.5
    for layer, peak in enumerate(peaks):
        calibrator.observe(layer, peak[None], -peak[None])
    tops = torch.tensor([top(layout.k_format), top(layout.v_format)])
    assert ((peaks[:, None] / tops) * tops < peaks[:, None]).any(), "this would not be seen"
    assert (calibrator.scales() * tops >= peaks[:, None]).all()


def test_zeros_make_no_peak_forgotten() -> None:
    calibrator = Calibrator(page_layout("int8_per_tensor", "int8_per_tensor", 16, 1, 1, 64), "smoothed_max", gamma=0.5)
    for x in (torch.ones(4), torch.zeros(4)):
        calibrator.observe(0, x, x)
    assert calibrator.scales().tolist() == [[pytest.approx(1 / 127)] * 2]


def test_smoothed_max_forgets_and_max_does_not() -> None:
    found = {}
    for policy in ("max", "smoothed_max"):
        calibrator = Calibrator(LAYOUT, policy, gamma=0.9)
        for size in (100.0, *[1.0] * 10):
            for layer in range(3):
                calibrator.observe(layer, torch.full((1,), size), torch.full((1,), size))
        found[policy] = float(calibrator.scales()[0, 0]) * 127
    assert found["max"] == pytest.approx(100) and found["smoothed_max"] == pytest.approx(100 * 0.9**10)


def test_what_cannot_be_learned_is_refused() -> None:
    calibrator = Calibrator(LAYOUT)
    calibrator.observe(0, torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match="k_scale of layer 1 saw only zeros"):
        calibrator.scales()
    with pytest.raises(ValueError, match="not finite"):
        calibrator.observe(0, torch.tensor([torch.nan]), torch.ones(1))
    with pytest.raises(ValueError, match="policy"):
        Calibrator(LAYOUT, "mean")


def test_writer_and_reader_use_the_scale_of_their_own_side_and_layer() -> None:
    layout = page_layout("int8_per_tensor", "int8_per_tensor", 16, 3, 1, 64, tail_format="fp32")
    case = kv_cases.build(layout, [32], layer=2)
    k, v = select("cpu").gather(
        case.pages, layout, 2, case.batch.tables[0, :2], dtype=torch.float32, scales=case.scales
    )
    for back, x, scale in ((k, case.k[0], case.scales[2, 0]), (v, case.v[0], case.scales[2, 1])):
        assert ((back - x).abs() <= scale / 2 * (1 + 1e-5) + (x.abs() - 127 * scale).clamp(min=0)).all()
