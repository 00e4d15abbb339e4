"""Scale files: what is written is read, and what must not be used is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.scale_file import BadScales, ScaleFile, read, write

FORMATS = ("int8_per_tensor", "fp8_e4m3_per_tensor")
GOOD = ScaleFile((0.5, 0.125, 0.03125), (0.25, 0.1875, 0.0625), "abc", *FORMATS, "max", 4096)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scales.{suffix}"
    write(path, GOOD)
    assert read(path, 3) == read(path, 3, "abc", *FORMATS) == GOOD
    assert [left.name for left in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    taken = tmp_path / f"scales.{suffix}"
    taken.mkdir()
    with pytest.raises(IsADirectoryError):
        write(taken, GOOD)
    assert list(tmp_path.iterdir()) == [taken]


def test_the_numbers_make_the_content_whatever_the_container(tmp_path: Path) -> None:
    for suffix in ("json", "safetensors"):
        write(tmp_path / f"scales.{suffix}", GOOD)
    as_json, as_tensors = (read(tmp_path / f"scales.{suffix}", 3) for suffix in ("json", "safetensors"))
    assert as_json.content == as_tensors.content
    assert replace(GOOD, model="", policy="").content == GOOD.content
    assert replace(GOOD, k_scale=(0.5, 0.125, 0.0625)).content != GOOD.content
    assert replace(GOOD, k_scale=GOOD.v_scale, v_scale=GOOD.k_scale).content != GOOD.content


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"v_scale": None}, "v_scale is missing"),
        ({"k_scale": [0.5, 0.125]}, "k_scale has 2 layers, the model has 3"),
        ({"k_scale": [0.5, 0.125, 0.03125, 1.0]}, "k_scale has 4 layers, the model has 3"),
        ({"k_scale": [0.5, 0.0, 0.03125]}, "k_scale of layer 1 is 0.0"),
        ({"v_scale": [0.25, 0.1875, -1.0]}, "v_scale of layer 2 is -1.0"),
        ({"v_scale": [float("nan"), 0.1875, 0.0625]}, "v_scale of layer 0 is nan"),
        ({"k_scale": [0.5, 0.125, float("inf")]}, "k_scale of layer 2 is inf"),
        ({"k_scale": [0.5, 0.125, 1e300]}, "k_scale of layer 2 is inf"),
        ({"k_scale": [0.5, 1e-60, 0.03125]}, "k_scale of layer 1 is 0.0"),
        ({"k_scale": GOOD.v_scale, "v_scale": GOOD.k_scale}, "swapped"),
        ({"k_scale": [0.5, 0.125, 0.03]}, "changed after it was calibrated"),
        ({"model": "another"}, "changed after it was calibrated"),
        ({"k_scale": 7}, "neither"),
        ({"k_scale": ["a"]}, "neither"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, change: dict[str, object], word: str) -> None:
    path = tmp_path / "scales.json"
    write(path, GOOD)
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(BadScales, match=f"scales.json: .*{word}"):
        read(path, 3)


def test_files_that_are_no_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadScales, match="cannot be read"):
        read(tmp_path / "nothing.json", 3)
    with pytest.raises(BadScales, match="cannot be read"):
        read(tmp_path / "nothing.safetensors", 3)
    for name, text in (("broken.json", "{"), ("list.json", "[1]"), ("broken.safetensors", "{")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadScales, match="neither"):
            read(tmp_path / name, 3)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scales.{suffix}"
    os.mkfifo(path)
    with pytest.raises(BadScales, match="is no file"):
        read(path, 3)


def test_a_foreign_file_is_taken_at_its_word(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"k_scale": [1, 2, 3], "v_scale": [4, 5, 6]}))
    found = read(path, 3, "abc", *FORMATS)
    assert (found.k_scale, found.v_scale, found.model) == ((1, 2, 3), (4, 5, 6), "")


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (("abd", *FORMATS), "another model"),
        (("abc", "fp8_e5m2_per_tensor", FORMATS[1]), "K scales are for int8_per_tensor, not for fp8_e5m2_per_tensor"),
        (("abc", FORMATS[0], "bf16"), "V scales are for fp8_e4m3_per_tensor, not for bf16"),
    ],
)
def test_scales_of_another_model_or_format_are_refused(tmp_path: Path, wanted: tuple[str, ...], word: str) -> None:
    path = tmp_path / "scales.safetensors"
    write(path, GOOD)
    with pytest.raises(BadScales, match=word):
        read(path, 3, *wanted)
