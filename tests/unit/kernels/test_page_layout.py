"""Where bytes are: alignment, sizes, names, skipped layers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels import formats
from kernels.layout import (
    ALIGN,
    PAGE_ALIGN,
    TABLE_ENTRY_BYTES,
    page_layout,
    parse_kv_cache_dtype,
    parse_skip_layers,
)


@pytest.mark.parametrize(
    "pair", [(k, v) for k in ("bf16", "int8_channel", "int4") for v in formats.names()], ids="-".join
)
def test_segments_are_aligned_and_do_not_overlap(pair: tuple[str, str]) -> None:
    for block_size, head_dim in ((16, 64), (32, 80), (16, 96), (16, 128), (32, 256)):
        layout = page_layout(*pair, block_size, 5, 3, head_dim, skip_layers=(0, 3))
        assert layout.page_bytes % PAGE_ALIGN == 0
        end = 0
        for index in range(5):
            place = layout.layer(index)
            k, v = (
                formats.load(place.k_format).sizes_k(layout.shape),
                formats.load(place.v_format).sizes_v(layout.shape),
            )
            starts = (place.k_codes, place.k_scales, place.v_codes, place.v_scales)
            for start, size in zip(starts, (*k, *v), strict=True):
                assert start >= end and start % ALIGN == 0
                end = start + size
        assert layout.page_bytes - PAGE_ALIGN < end <= layout.page_bytes


def test_sizes_of_smollm2() -> None:
    layout = page_layout("bf16", "bf16", 16, 30, 3, 64)
    assert layout.page_bytes == 360 * 1024 and layout.bytes_per_token() == 23_040
    assert layout.tail_bytes == 360 * 1024
    assert page_layout("int8", "int8", 16, 30, 3, 64).bytes_per_token() < 0.53 * 23_040
    assert page_layout("int4", "int4", 16, 30, 3, 64).bytes_per_token() < 0.31 * 23_040


def test_shares_of_what_is_not_codes() -> None:
    whole = page_layout("bf16", "bf16", 16, 30, 3, 64)
    assert whole.scale_share() == 0 and whole.table_share() < 0.001
    smallest = page_layout("bf16", "bf16", 16, 1, 1, 16)
    assert smallest.table_share() == TABLE_ENTRY_BYTES / (TABLE_ENTRY_BYTES + PAGE_ALIGN)
    small, large = (page_layout("int8_channel", "int8_channel", size, 30, 3, 64) for size in (16, 32))
    assert small.scale_share() > 0.1 > large.scale_share() > 0
    assert page_layout("bf16", "bf16", 16, 1, 1, 48).scale_share() == 1 - 3072 / 4096, "padding counts"


def test_skipped_layers_stay_in_the_compute_dtype() -> None:
    layout = page_layout("int8", "int4", 16, 4, 2, 64, skip_layers=(3, 0), tail_format="fp16")
    assert layout.skip_layers == (0, 3)
    assert [layout.layer(i).k_format for i in range(4)] == ["fp16", "int8", "int8", "fp16"]
    assert [layout.layer(i).v_format for i in range(4)] == ["fp16", "int4", "int4", "fp16"]


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("auto",), ("bf16", "bf16")),
        (("auto", None, None, "float32"), ("fp32", "fp32")),
        (("bfloat16",), ("bf16", "bf16")),
        (("fp8",), ("fp8_e4m3", "fp8_e4m3")),
        (("int8_channel",), ("int8_channel", "int8_channel")),
        (("k16v4",), ("bf16", "int4")),
        (("k16v4", None, None, "fp16"), ("fp16", "int4")),
        (("k8v4",), ("int8_channel", "int4")),
        (("auto", "int8"), ("int8", "bf16")),
        (("int8", None, "auto"), ("int8", "bf16")),
    ],
)
def test_names_of_kv_cache_dtype(names: tuple[str, ...], want: tuple[str, str]) -> None:
    assert parse_kv_cache_dtype(*names) == want


@pytest.mark.parametrize(
    ("names", "wrong", "pairs"),
    [(("int9",), "int9", True), (("int9", "int8", "int8"), "int9", True), (("auto", "k8v4"), "k8v4", False)],
)
def test_a_wrong_name_is_refused_with_the_right_ones(names: tuple[str, ...], wrong: str, pairs: bool) -> None:
    with pytest.raises(ValueError, match=f"no KV format '{wrong}'; choose one of auto, .*int8_channel") as caught:
        parse_kv_cache_dtype(*names)
    assert ("k16v4" in str(caught.value)) == pairs


def test_skip_layers_by_index_first_and_last() -> None:
    assert parse_skip_layers(["first:2", "last:1", 5, "7"], 30) == (0, 1, 5, 7, 29)
    assert parse_skip_layers([], 30) == () and parse_skip_layers(["first:0"], 30) == ()
    for wrong in ("middle:2", "first:31", "30", "-1", "first:", "x"):
        with pytest.raises(ValueError, match="kv_cache_dtype_skip_layers"):
            parse_skip_layers([wrong], 30)


def test_what_cannot_be_is_refused_by_name() -> None:
    for arguments, word in (
        (("int9", "int8", 16, 1, 1, 64), "int9"),
        (("int8", "int8", 8, 1, 1, 64), "block_size"),
        (("int8", "int8", 16, 1, 1, 72), "head_dim"),
        (("int8", "int8", 16, 1, 1, 64, (1,)), "skip_layers"),
        (("int8", "int8", 16, 1, 1, 64, (), "int8"), "tail_format"),
    ):
        with pytest.raises(ValueError, match=word):
            page_layout(*arguments)


def test_geometry_needs_neither_torch_nor_numpy() -> None:
    code = "import sys; from kernels.layout import page_layout as p; p('int4', 'int8', 16, 2, 1, 64); \
            assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
