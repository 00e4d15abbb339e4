"""Which tile a layer gets: the nearest entry of a GPU's table, else of the default one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.layout import page_layout
from kernels.triton import tuning
from kernels.triton.tuning import TileShape, tile_key, tile_shape, together_shape


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The table of a GPU that knows little."""
    decode = {"int8/*/128": [128, 8, 3], "int8/int4/96": [16, 2, 1, 96]}
    (tmp_path / "gpu.json").write_text(json.dumps({"decode": decode}))
    (tmp_path / "default.json").write_text((tuning.FOLDER / "default.json").read_text())
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    forget()
    yield "gpu"
    forget()


def forget() -> None:
    for function in (tuning._table, tile_shape, together_shape):
        function.cache_clear()


def test_the_nearest_entry_counts(table: str) -> None:
    assert tile_shape("int8", "int4", 96, 4, 1, table) == TileShape(16, 16, 2, 1, 96)
    assert tile_shape("int8", "int8", 96, 4, 1, table) == TileShape(16, 128, 8, 3)  # 96 channels take the room of 128
    default = tile_shape("int8", "int8", 256, 4, 1)
    assert tile_shape("int8", "int8", 256, 4, 1, table) == default  # what the GPU's table lacks


def test_an_empty_entry_is_no_tile(table: str) -> None:
    assert together_shape("fp32", "fp32", 256, 4, 8, table) is None


def test_rows_hold_all_query_heads_of_a_kv_head(table: str) -> None:
    assert [tile_shape("bf16", "bf16", 64, group, 1).rows for group in (1, 3, 16, 17, 64)] == [16, 16, 16, 32, 64]
    assert tile_shape("bf16", "bf16", 64, 4, 7).rows == 64
    shapes = [together_shape("bf16", "bf16", 64, 4, members) for members in (4, 5)]
    assert [shape.rows for shape in shapes if shape is not None] == [16, 32]


def test_fp32_compute_has_the_tile_of_fp32() -> None:
    for compute, wanted in (("bf16", ("int8", "int4", 64, 3)), ("fp32", ("fp32", "fp32", 64, 3))):
        layout = page_layout("int8", "int4", 16, 2, 2, 64, tail_format=compute)
        assert tile_key(layout, layout.layer(0), 3) == wanted
