"""What doctor and stats say about the cost of a cached token, and when they warn."""

from __future__ import annotations

import pytest

from services.cli.geometry import COMMON, findings, too_small
from shared.models.config import ModelConfig
from shared.models.files import prepare
from shared.settings import BlockManagerSettings


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return prepare("smollm2-135m", "bfloat16").config


def test_the_configured_cache_comes_first_and_common_formats_beside_it(config: ModelConfig) -> None:
    first, *others = findings(config, BlockManagerSettings())
    assert first.level == "ok" and first.value.startswith("23,040 bytes per token, bf16/bf16, block size 16")
    assert [other.name for other in others] == [f"KV {name}" for name in COMMON]
    assert {other.level for other in others} == {"ok"}


def test_pages_too_small_for_their_scales_are_a_warning(config: ModelConfig) -> None:
    small = findings(config, BlockManagerSettings(kv_cache_dtype="int8_channel"))[0]
    assert small.level == "warn" and "--block-size 32" in small.fix and "13,312 bytes" in small.value
    large = findings(config, BlockManagerSettings(kv_cache_dtype="int8_channel", block_size=32))[0]
    assert large.level == "ok" and not large.fix


def test_pairs_and_skipped_layers_are_shown(config: ModelConfig) -> None:
    chosen = BlockManagerSettings(k_cache_dtype="int8", v_cache_dtype="int4", kv_cache_dtype_skip_layers="first:2,29")
    value = findings(config, chosen)[0].value
    assert "int8/int4, 3 layers in bf16" in value


def test_what_cannot_be_is_a_failure(config: ModelConfig) -> None:
    (only,) = findings(config, BlockManagerSettings(kv_cache_dtype_skip_layers="first:31"))
    assert only.level == "fail" and "30 layers" in only.value


@pytest.mark.parametrize(
    ("block_size", "table", "scales", "word"),
    [
        (16, 0.1, 0.1, ""),
        (16, 0.0, 0.11, "scales and padding take 11%"),
        (16, 0.12, 0.0, "the block table takes 12%"),
        (32, 0.5, 0.5, ""),
    ],
)
def test_the_warning_begins_above_a_tenth(block_size: int, table: float, scales: float, word: str) -> None:
    advice = too_small(block_size, table, scales)
    assert advice.startswith(word) and bool(advice) == bool(word)
