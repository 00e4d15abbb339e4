"""These tests run Triton kernels: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set for the process."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.models.config import ModelConfig
from shared.models.files import ModelFiles, prepare
from shared.models.rope import Rope


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the interpreter works on CPU tensors."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    """A random model with everything the demo model lacks: biases, q/k norms, a sliding window, an untied head."""
    config = ModelConfig(
        architecture="qwen3", name="small", layers=2, heads=4, kv_heads=2, head_dim=32, hidden_size=96, ffn_size=160,
        vocab_size=101, rms_eps=1e-6, context_length=128, rope=Rope(base=500.0), qkv_bias=True, qk_norm=True,
        sliding_window=20, sliding_layers=(1,),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    hidden, ffn, rows = config.hidden_size, config.ffn_size, (config.heads + 2 * config.kv_heads) * config.head_dim
    shapes = {"embed": (101, hidden), "head": (101, hidden), "norm": (hidden,)}
    for layer in range(config.layers):
        parts = {"input_norm": (hidden,), "qkv": (rows, hidden), "qkv_bias": (rows,), "q_norm": (config.head_dim,),
                 "k_norm": (config.head_dim,), "o": (hidden, config.heads * config.head_dim), "post_norm": (hidden,),
                 "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}  # fmt: skip
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "weights.safetensors")
    return dataclasses.replace(
        prepare("smollm2-135m", "float32"), config=config, directory=tmp_path, packed=None, dtype="float32",
        weights=tmp_path / "weights.safetensors",
    )  # fmt: skip
