"""From cache settings to a pool's layout, scales and fingerprint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.scale_file import ScaleFile, write
from shared.errors import Misconfigured
from shared.models.files import ModelFiles, prepare
from shared.pool.layout import cache_for, geometry, layout_for
from shared.settings import BlockManagerSettings, load

LAYERS = 30


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return prepare("smollm2-135m", "bfloat16")


def scale_file(files: ModelFiles, k_format: str = "int8_per_tensor", v_format: str = "int8_per_tensor") -> ScaleFile:
    k, v = tuple(0.5 + layer for layer in range(LAYERS)), tuple(0.25 + layer for layer in range(LAYERS))
    return ScaleFile(k, v, files.identity, k_format, v_format, "max", 1000)


def per_tensor(path: Path) -> BlockManagerSettings:
    return BlockManagerSettings(kv_cache_dtype="int8_per_tensor", kv_scales_path=path)


def test_every_setting_that_changes_bytes_changes_the_fingerprint(files: ModelFiles) -> None:
    choices = [
        {}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int8_channel"}, {"kv_cache_dtype": "k16v4"},
        {"k_cache_dtype": "int8"}, {"v_cache_dtype": "int8"}, {"block_size": 32},
        {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("first:1",)},
        {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("last:1",)},
    ]  # fmt: skip
    layouts = [layout_for(files, BlockManagerSettings(**choice)) for choice in choices]
    assert len({layout.fingerprint for layout in layouts}) == len(choices)
    for layout in layouts:
        assert geometry(layout).page_bytes == layout.page_bytes
    same = layout_for(files, BlockManagerSettings(kv_cache_dtype="bfloat16"))
    assert same == layouts[0], "auto is the compute dtype"


def test_the_numbers_of_the_scale_file_are_part_of_the_fingerprint(files: ModelFiles, tmp_path: Path) -> None:
    good = scale_file(files)
    changed = replace(good, v_scale=(*good.v_scale[:-1], 1.0))
    for name, content in (("a.json", good), ("a.safetensors", good), ("b.json", changed)):
        write(tmp_path / name, content)
    found = {path.name: cache_for(files, per_tensor(path)) for path in tmp_path.iterdir()}
    assert found["a.json"].scales == found["a.safetensors"].scales == good
    assert found["a.json"].layout == found["a.safetensors"].layout
    assert found["a.json"].layout.fingerprint != found["b.json"].layout.fingerprint
    assert found["a.json"].layout.page_bytes == found["b.json"].layout.page_bytes


def test_scales_that_are_missing_useless_or_wrong_are_refused(files: ModelFiles, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    with pytest.raises(Misconfigured, match=r"need kv_scales_path.*kvrelay calibrate"):
        layout_for(files, BlockManagerSettings(kv_cache_dtype="int8_per_tensor"))
    with pytest.raises(Misconfigured, match=r"kv_scales_path: .*scales\.json: cannot be read"):
        layout_for(files, per_tensor(path))
    write(path, scale_file(files))
    with pytest.raises(Misconfigured, match="keep their scales in the page; leave it out"):
        layout_for(files, BlockManagerSettings(kv_cache_dtype="int8", kv_scales_path=path))
    with pytest.raises(Misconfigured, match="not for fp8_e4m3_per_tensor"):
        layout_for(files, BlockManagerSettings(kv_cache_dtype="fp8_per_tensor", kv_scales_path=path))
    write(path, replace(scale_file(files), model="another model"))
    with pytest.raises(Misconfigured, match="another model"):
        layout_for(files, per_tensor(path))
    short = scale_file(files)
    write(path, replace(short, k_scale=short.k_scale[:-1]))
    with pytest.raises(Misconfigured, match="k_scale has 29 layers, the model has 30"):
        layout_for(files, per_tensor(path))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "kv_cache_dtype",
            "int9",
            r"kv_cache_dtype \(flag\): there is no KV format 'int9'; choose one of auto, .*k16v4",
        ),
        ("k_cache_dtype", "k8v4", r"k_cache_dtype \(flag\): there is no KV format 'k8v4'"),
        ("v_cache_dtype", "", r"v_cache_dtype \(flag\): there is no KV format ''"),
        (
            "kv_cache_dtype_skip_layers",
            "middle:1",
            r"skip_layers \(flag\): 'middle:1' is not an index, first:n or last:n",
        ),
    ],
)
def test_wrong_names_are_refused_when_settings_are_read(name: str, value: str, text: str) -> None:
    with pytest.raises(Misconfigured, match=text):
        load(BlockManagerSettings, {name: value}, {})


def test_layers_beyond_the_model_and_odd_block_sizes_are_refused(files: ModelFiles) -> None:
    with pytest.raises(Misconfigured, match="beyond the model's 30 layers"):
        layout_for(files, BlockManagerSettings(kv_cache_dtype_skip_layers="30"))
    with pytest.raises(Misconfigured, match="block_size must be 16 or 32"):
        layout_for(files, BlockManagerSettings(block_size=24))


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("auto", ("bf16", "bf16")),
        ("quantised", ("int8_channel", "int8_channel")),
        ("int8_per_channel", ("int8_channel", "int8_channel")),
        ("int8_per_token_head", ("int8", "int8")),
        ("fp8_e5m2_per_token_head", ("fp8_e5m2", "fp8_e5m2")),
        ("k8v4", ("int8_channel", "int4")),
    ],
)
def test_names_of_granularities(files: ModelFiles, name: str, formats: tuple[str, str]) -> None:
    layout = layout_for(files, BlockManagerSettings(kv_cache_dtype=name))
    assert (layout.k_format, layout.v_format) == formats
