"""Every architecture and rope variant, from a Hugging Face folder through the cache to logits, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.attention import Batch
from kernels.layout import page_layout
from shared.models.architecture import supported
from shared.models.files import ModelFiles, prepare
from shared.models.kv_step import KVStep
from shared.models.transformer import Transformer
from tests.support import tiny_models

BLOCK = 16
LENGTH, PREFILL = 70, 39


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.4 * i for i in range(8)]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-linear": ("llama", rope("linear", factor=2.5)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-set": (
        "llama",
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3
        ),
    ),
    "llama-longrope": ("llama", rope("longrope", factor=4.0, original_max_position_embeddings=32, **FACTORS)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", rope("yarn", factor=2.0, original_max_position_embeddings=64)),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2}),
}


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _ in CASES.values()} == set(supported())


class Sequence:
    """One sequence over its own pages and tail: prefilled in chunks, then extended token by token."""

    def __init__(self, files: ModelFiles, backend: str) -> None:
        self.ops = dispatch.select(backend)
        self.model = Transformer(files, "float32", self.ops, threads=1)
        config = files.config
        self.layout = page_layout(
            "fp32", "fp32", BLOCK, config.layers, config.kv_heads, config.head_dim, tail_format="fp32"
        )
        self.pages = torch.zeros(8, self.layout.page_bytes, dtype=torch.uint8)
        self.tails = torch.zeros(2, self.layout.tail_bytes, dtype=torch.uint8)
        self.length = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of all `tokens`, which must start at a page's edge or be one token."""
        rows, sealed = len(tokens), self.length // BLOCK
        fresh = 0 if rows == 1 else rows // BLOCK
        within = torch.arange(self.length + fresh * BLOCK, self.length + rows) % BLOCK
        self.length += rows
        kv = KVStep(
            pages=self.pages,
            tails=self.tails,
            layout=self.layout,
            batch=Batch(
                tables=_ints(range(8)).view(1, 8),
                page_counts=_ints([sealed + fresh]),
                tail_slots=_ints([1]),
                tail_lengths=_ints([self.length - (sealed + fresh) * BLOCK]),
                query_starts=_ints([0, rows]),
                max_pages=sealed + fresh,
                max_query=rows,
            ),
            append_slots=torch.ones(len(within), dtype=torch.int32),
            append_positions=within.int(),
            seal_blocks=_ints(range(sealed, sealed + fresh)) if fresh else None,
        )
        positions = torch.arange(self.length - rows, self.length)
        logits = self.model.forward(tokens, positions, kv, list(range(rows)))
        if rows == 1 and self.length % BLOCK == 0:
            self.ops.seal_tails(self.pages, self.tails, self.layout, _ints([1]), _ints([self.length // BLOCK - 1]))
        return logits


def _ints(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelFiles, torch.Tensor, torch.Tensor]:
    """(converted files, tokens, transformers' logits [LENGTH, vocabulary]) of one case."""
    architecture, overrides = CASES[request.param]
    path: Path = tmp_path_factory.mktemp(request.param)
    model = tiny_models.folder(path / "model", architecture, **overrides)
    tokens = torch.randint(3, tiny_models.VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = model(tokens.view(1, -1)).logits[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_CACHE_DIR", str(path / "cache"))
        return prepare(str(path / "model"), "float32"), tokens, expected


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_equal_transformers(case: tuple[ModelFiles, torch.Tensor, torch.Tensor], backend: str) -> None:
    files, tokens, expected = case
    try:
        sequence = Sequence(files, backend)
    except dispatch.BackendUnavailable as reason:
        pytest.skip(str(reason))
    chunks = [tokens[: 2 * BLOCK], tokens[2 * BLOCK : PREFILL], *tokens[PREFILL:].split(1)]
    logits = torch.cat([sequence.forward(chunk) for chunk in chunks])
    assert expected.std() > 0.5, "logits too flat to tell anything"
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
