"""Scales learned from a model's own keys and values: nothing clips, sides are apart, lengths do not matter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infra.bench import paged_run
from kernels.dispatch import select
from kernels.layout import PageLayout
from kernels.scale_file import ScaleFile
from kernels.scales import PoolScales
from shared.errors import BadRequest
from shared.models import calibration, files, runtime
from shared.models.files import ModelFiles
from shared.models.transformer import Transformer
from shared.pool.layout import pages_for
from shared.settings import BlockManagerSettings
from tests.support.tiny_models import folder

PROMPTS = [[7, 9, 30], [5], list(range(3, 100)), [11] * 16, [250, 4] * 8 + [9]]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, Transformer]:
    path = tmp_path_factory.mktemp("model")
    folder(path, "llama", max_position_embeddings=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_CACHE_DIR", str(path / "cache"))
        prepared = files.prepare(str(path), "float32")
    return prepared, runtime.load(prepared, "float32", request.param, 1)


def pages(model: tuple[ModelFiles, Transformer], **formats: str) -> PageLayout:
    return pages_for(model[0].config, "fp32", BlockManagerSettings(**formats))


def learn(
    model: tuple[ModelFiles, Transformer], prompts: Sequence[Sequence[int]], layout: PageLayout, policy: str = "max"
) -> ScaleFile:
    return calibration.calibrate(model[1], model[0].identity, prompts, layout, policy)


@pytest.mark.parametrize("policy", ["max", "smoothed_max"])
def test_what_was_seen_last_never_clips_and_sides_are_apart(
    model: tuple[ModelFiles, Transformer], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = pages(model, k_cache_dtype="int8_per_tensor", v_cache_dtype="fp8_per_tensor")
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    observe = calibration.Calibrator.observe

    def record(self: calibration.Calibrator, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        seen.append((layer, k.clone(), v.clone()))
        observe(self, layer, k, v)

    monkeypatch.setattr(calibration.Calibrator, "observe", record)
    found = learn(model, PROMPTS, layout, policy)
    assert (found.model, found.policy, found.tokens) == (model[0].identity, policy, 3 + 1 + 64 + 16 + 17)
    assert (found.k_format, found.v_format) == ("int8_per_tensor", "fp8_e4m3_per_tensor")
    scales = PoolScales(found, layout)
    for layer, k, v in seen if policy == "max" else seen[-layout.layers :]:
        scales.count(layer, k, v)
    assert scales.stored > 0 and scales.clipped_fraction == 0
    for layer in range(layout.layers):
        top_k = max(float(k.abs().max()) for at, k, _ in seen if at == layer)
        top_v = max(float(v.abs().max()) for at, _, v in seen if at == layer)
        if policy == "max":
            assert found.k_scale[layer] == pytest.approx(top_k / 127)
            assert found.v_scale[layer] == pytest.approx(top_v / 448)
        assert found.k_scale[layer] != found.v_scale[layer]


def test_scales_are_those_of_what_lies_in_the_pages(model: tuple[ModelFiles, Transformer]) -> None:
    tokens, raw = list(range(3, 67)), paged_run.layout_of(model[0].config, "float32")
    found = learn(model, [tokens], pages(model, kv_cache_dtype="int8_per_tensor"), "smoothed_max")
    run = paged_run.PagedRun(model[1], raw, sequences=1, length=len(tokens))
    run.prefill(0, tokens)
    for layer in range(raw.layers):
        k, v = select("reference").gather(run.pages, raw, layer, torch.arange(4, dtype=torch.int32))
        assert found.k_scale[layer] == pytest.approx(float(k.abs().max()) / 127)
        assert found.v_scale[layer] == pytest.approx(float(v.abs().max()) / 127)


@pytest.mark.parametrize("name", ["int8_per_tensor", "fp8_per_tensor"])
def test_the_same_prompts_do_not_saturate_when_served(model: tuple[ModelFiles, Transformer], name: str) -> None:
    """Pages in the format itself move what later layers see, beyond what was seen over pages in full precision."""
    layout = pages(model, kv_cache_dtype=name)
    for policy in ("max", "smoothed_max"):
        scales = PoolScales(learn(model, PROMPTS, layout, policy), layout)
        for chunk in (16, 48, 512):
            for done in calibration.run_over(model[1], PROMPTS, layout, scales.tensor, scales.count, chunk):
                assert done > 0
        assert scales.stored > 0
        assert (scales.clipped == 0) == (policy == "max")  # which forgets a little, and so shows what there was to mend


def test_one_token_is_enough_and_more_than_the_context_is_cut(model: tuple[ModelFiles, Transformer]) -> None:
    layout = pages(model, kv_cache_dtype="int8_per_tensor")
    assert learn(model, [[5]], layout).tokens == 1
    assert learn(model, [list(range(3, 103))], layout) == learn(model, [list(range(3, 67))], layout)


def test_a_side_with_scales_in_the_page_needs_none(model: tuple[ModelFiles, Transformer]) -> None:
    found = learn(model, PROMPTS, pages(model, k_cache_dtype="int8_per_tensor", v_cache_dtype="int4"))
    assert found.v_format == "int4" and all(scale > 0 for scale in found.v_scale)


def test_nothing_is_learned_from_nothing(model: tuple[ModelFiles, Transformer]) -> None:
    layout = pages(model, kv_cache_dtype="int8_per_tensor")
    for prompts in ([], [[]]):
        with pytest.raises(BadRequest, match="no prompts"):
            learn(model, prompts, layout)
