"""Native ops refuse what they would read or write beyond: C checks nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from kernels.cpu.gather import gather_into
from kernels.dispatch import select
from kernels.layout import page_layout
from tests.support import kv_cases
from tests.support.kv_cases import i32

CPU = select("cpu")
LAYOUT = page_layout("int8_per_tensor", "int8", 16, 2, 2, 64, skip_layers=(0,))
PAGES = torch.zeros(4, LAYOUT.page_bytes, dtype=torch.uint8)
TAILS = torch.zeros(4, LAYOUT.tail_bytes, dtype=torch.uint8)
SCALES = torch.ones(2, 2)
X = torch.zeros(32, 2, 64)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "fewer tokens than pages": (lambda: CPU.seal(PAGES, LAYOUT, 1, X, X, i32(0, 1, 2), SCALES), "48 tokens"),
    "values unlike keys": (lambda: CPU.seal(PAGES, LAYOUT, 1, X, X[:16], i32(0, 1), SCALES), "of one dtype"),
    "heads of another size": (lambda: CPU.seal(PAGES, LAYOUT, 0, X[..., :32], X[..., :32], i32(0, 1)), "2, 64"),
    "activations in float64": (lambda: CPU.seal(PAGES, LAYOUT, 0, X.double(), X.double(), i32(0, 1)), "fp32, bf16"),
    "no scales": (lambda: CPU.seal(PAGES, LAYOUT, 1, X, X, i32(0, 1)), "kv_scales_path"),
    "no scales, first layer needs none": (lambda: CPU.seal_tails(PAGES, TAILS, LAYOUT, i32(0), i32(0)), "kv_scales"),
    "scales of a layer missing": (lambda: CPU.seal(PAGES, LAYOUT, 1, X, X, i32(0, 1), SCALES[:1]), r"\[2, 2\]"),
    "scales in float64": (lambda: CPU.seal(PAGES, LAYOUT, 1, X, X, i32(0, 1), SCALES.double()), "fp32"),
    "fewer slots than pages": (lambda: CPU.seal_tails(PAGES, TAILS, LAYOUT, i32(0), i32(0, 1), SCALES), "as many"),
    "fewer slots than tokens": (lambda: CPU.append_tails(TAILS, LAYOUT, 0, X[:2], X[:2], i32(0), i32(0)), "disagree"),
    "fewer values than keys": (lambda: CPU.append_tails(TAILS, LAYOUT, 0, X[:1], X[:0], i32(0), i32(0)), "disagree"),
    "rows of unequal width": (lambda: CPU.copy_pages(PAGES, TAILS[:, 64:], i32(0), i32(1)), "equal width"),
    "fewer sources than targets": (lambda: CPU.copy_pages(PAGES, PAGES, i32(0), i32(1, 2)), "as many"),
    "targets that differ": (
        lambda: gather_into(PAGES, LAYOUT, 0, i32(0, 1), X, X.clone().transpose(0, 1), None), "k and v must be alike"
    ),
    "a residual of another shape": (lambda: CPU.rms_norm(X[:4], torch.ones(64), 1e-5, X[:2]), "residual"),
    "a residual with gaps": (lambda: CPU.rms_norm(X[:, 0], torch.ones(64), 1e-5, X[:, 1]), "residual"),
    "angles of another length": (lambda: CPU.rope(X, X, torch.ones(32, 16), torch.ones(32, 16)), "rope takes"),
    "angles of fewer tokens": (lambda: CPU.rope(X, X, torch.ones(8, 32), torch.ones(8, 32)), "rope takes"),
    "heads with gaps": (lambda: CPU.rope(X[..., :32], X, torch.ones(32, 16), torch.ones(32, 16)), "rope takes"),
    "no columns": (lambda: CPU.argmax_rows(torch.empty(3, 0)), "with columns"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "word"), REFUSED.values(), ids=list(REFUSED))
def test_before_anything_is_touched(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()
    assert not PAGES.any() and not TAILS.any()


def test_attention_that_would_read_or_write_elsewhere() -> None:
    case = kv_cases.build(page_layout("bf16", "bf16", 16, 1, 2, 64), [40, 40])
    q, lse = torch.randn(2, 4, 64), torch.empty(2, 4, 2 * case.batch.max_pages)[..., ::2]
    heads = case.batch.tables.unsqueeze(1).expand(2, 2, -1)
    spread = dataclasses.replace(case.batch, kv_head_tables=heads, kv_head_counts=i32(1, 1, 1, 1).view(2, 2))
    for batch, given, options, word in (
        (case.batch, q.double(), {}, "fp32, bf16 or fp16"),
        (case.batch, q, {"out": torch.empty(2, 4, 64, dtype=torch.bfloat16)}, "out must be"),
        (case.batch, q, {"out": torch.empty(2, 64, 4).transpose(1, 2)}, "out must be"),
        (case.batch, q, {"page_lse": lse}, "page_lse must be"),
        (spread, q, {}, "kv_head_tables.* must be contiguous"),
    ):
        with pytest.raises(ValueError, match=word):
            kv_cases.attend(CPU, given, case, batch, **options)
