"""Rotary frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.models.config import ModelConfig, Rope
from shared.models.fields import Fields
from shared.models.huggingface import model_config
from shared.models.rope import inverse_frequencies

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16},
    {
        "rope_type": "longrope",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * i for i in range(64)],
        "long_factor": [1.0 + i for i in range(64)],
    },
]


def config(**settings: Any) -> tuple[ModelConfig, transformers.LlamaConfig]:
    theirs = transformers.LlamaConfig(num_attention_heads=32, head_dim=128, max_position_embeddings=131072, **settings)
    return model_config(Fields("test", {**theirs.to_dict(), "model_type": "llama"}), "test"), theirs


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_frequencies_equal_transformers(scaling: dict[str, Any], base: float) -> None:
    ours, theirs = config(rope_parameters={**scaling, "rope_theta": base})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu", seq_len=131072)
    frequencies, ours_factor = inverse_frequencies(ours)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=5e-7)
    assert ours_factor == pytest.approx(factor)


def test_old_form_of_the_settings_means_the_same() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})[1].to_dict()
    del fields["rope_parameters"]
    old = model_config(
        Fields("old", {**fields, "model_type": "llama", "rope_theta": 1e6, "rope_scaling": scaling}), "x"
    )
    new = config(rope_parameters={**scaling, "rope_type": "yarn", "rope_theta": 1e6})[0]
    assert old.rope == new.rope


def test_gguf_factors_are_llama3_scaling() -> None:
    """GGUF stores what llama3 scaling divides each frequency by."""
    ours, _ = config(rope_parameters={**SCALINGS[2], "rope_theta": 500_000.0})
    scaled, _ = inverse_frequencies(ours)
    plain, _ = inverse_frequencies(config(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})[0])
    stored = Rope(500_000.0, "factors", factors=tuple((plain / scaled).tolist()))
    by_factors, factor = inverse_frequencies(ModelConfig.from_json({**ours.to_json(), "rope": {**stored.__dict__}}))
    np.testing.assert_allclose(by_factors, scaled, rtol=2e-7)
    assert factor == 1.0


def test_length_dependent_variants_follow_the_served_length() -> None:
    longrope, _ = config(rope_parameters={**SCALINGS[6], "rope_theta": 10_000.0})
    assert inverse_frequencies(longrope, 4096)[0][3] > inverse_frequencies(longrope, 4097)[0][3]
    dynamic, theirs = config(rope_parameters={**SCALINGS[1], "rope_theta": 10_000.0})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=200_000)
    np.testing.assert_allclose(inverse_frequencies(dynamic, 200_000)[0], expected.numpy(), rtol=5e-7)
