"""The forward pass: right against Hugging Face transformers, and the same for a row whatever is computed beside it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infra.bench.paged_run import PagedRun, layout_of
from kernels.dispatch import select
from shared.errors import BadRequest
from shared.models.config import ModelConfig, Rope
from shared.models.files import ModelFiles, prepare
from shared.models.panels import map_panels
from shared.models.transformer import DTYPES, Transformer
from shared.models.weights import map_tensors

TEXT = torch.randint(0, 49_152, (67,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def expected(files: Callable[[str], ModelFiles]) -> torch.Tensor:
    """Logits of TEXT by transformers in fp32 on the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fp32 = files("float32")
    config, weights = fp32.config, map_tensors(fp32.weights)
    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.ffn_size,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        rms_norm_eps=config.rms_eps, tie_word_embeddings=True, max_position_embeddings=config.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.base},
    )  # fmt: skip
    with torch.device("meta"):  # random weights, soon to be replaced, would take seconds to draw
        model = LlamaForCausalLM(shape)
    model.model.rotary_emb = LlamaRotaryEmbedding(shape)
    state = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["norm"]}
    state["lm_head.weight"] = weights["embed"]
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        q, k, v = weights[ours + "qkv"].split((config.q_rows, config.kv_rows, config.kv_rows))
        gate, up = weights[ours + "gate_up"].chunk(2)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate,
                 "mlp.up_proj": up, "self_attn.o_proj": weights[ours + "o"], "mlp.down_proj": weights[ours + "down"],
                 "input_layernorm": weights[ours + "input_norm"],
                 "post_attention_layernorm": weights[ours + "post_norm"]}  # fmt: skip
        state |= {f"{theirs}{name}.weight": tensor for name, tensor in parts.items()}
    model.load_state_dict(state, assign=True)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TEXT])).logits[0]
    return logits


def through_pages(files: ModelFiles, kernels: str) -> torch.Tensor:
    """Logits of TEXT: two chunks of prefill, then decode over the edge of a page."""
    model = Transformer(files, files.dtype, select(kernels), 2 if kernels == "cpu" else 1)
    run = PagedRun(model, layout_of(model.config, files.dtype), 1, 96)
    chunks = [run.prefill(0, TEXT[:32], list(range(32))), run.prefill(0, TEXT[32:60], list(range(28)))]
    return torch.cat(chunks + [run.decode([0], [token]) for token in TEXT[60:]])


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_fp32_equals_transformers(kernels: str, files: Callable[[str], ModelFiles], expected: torch.Tensor) -> None:
    got = through_pages(files("float32"), kernels)
    assert (got - expected).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("kernels", "bound"), [("cpu", 0.001), ("reference", 0.004)])
def test_bf16_stays_close(
    kernels: str, bound: float, files: Callable[[str], ModelFiles], expected: torch.Tensor
) -> None:
    got = through_pages(files("bfloat16"), kernels)
    divergence = torch.nn.functional.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < bound


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_never_depends_on_the_batch(dtype: str, files: Callable[[str], ModelFiles]) -> None:
    model = Transformer(files(dtype), dtype, select("cpu"), 2)
    layout = layout_of(model.config, dtype)
    run, alone = PagedRun(model, layout, 32, 64), PagedRun(model, layout, 32, 64)
    for sequence in range(32):
        prompt = TEXT[sequence : sequence + 13 + sequence % 7]
        run.prefill(sequence, prompt)
        alone.prefill(sequence, prompt)
    for size in (1, 2, 3, 5, 8, 17, 32):
        sequences = list(range(32))[-size:]
        tokens = [TEXT[size + sequence] for sequence in sequences]
        together = run.decode(sequences, tokens)
        for row, sequence in enumerate(sequences):
            if row in (0, 1, size - 1):
                assert torch.equal(together[row], alone.decode([sequence], [tokens[row]])[0])
            else:
                alone.decode([sequence], [tokens[row]])


def test_cuts_between_chunks_leave_no_trace(files: Callable[[str], ModelFiles]) -> None:
    model = Transformer(files("bfloat16"), "bfloat16", select("cpu"), 2)
    layout = layout_of(model.config, "bfloat16", "int8")
    whole = PagedRun(model, layout, 1, 96).prefill(0, TEXT)
    for cut in (16, 32, 64):
        run = PagedRun(model, layout, 1, 96)
        run.prefill(0, TEXT[:cut], [])
        torch.testing.assert_close(run.prefill(0, TEXT[cut:]), whole, rtol=0, atol=0.05)


def test_tokens_and_positions_beyond_the_model_are_refused(files: Callable[[str], ModelFiles]) -> None:
    model = Transformer(files("bfloat16"), "bfloat16", select("cpu"), 1)
    run = PagedRun(model, layout_of(model.config, "bfloat16"), 1, 16)
    for token in (-1, model.config.vocab_size):
        with pytest.raises(BadRequest, match="beyond the model"):
            run.decode([0], [token])


def test_an_attention_error_reaches_the_caller(files: Callable[[str], ModelFiles]) -> None:
    model = Transformer(files("bfloat16"), "bfloat16", select("cpu"), 1)
    run = PagedRun(model, layout_of(model.config, "bfloat16", "fp8_per_tensor"), 1, 32)
    for step in (lambda: run.prefill(0, TEXT[:16]), lambda: run.decode([0], TEXT[:1])):
        with pytest.raises(ValueError, match="kv_scales_path"):
            step()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_weights_are_shared_not_copied(files: Callable[[str], ModelFiles]) -> None:
    bf16 = files("bfloat16")
    model = Transformer(bf16, "bfloat16", select("cpu"), 1)
    PagedRun(model, layout_of(model.config, "bfloat16"), 1, 32).prefill(0, TEXT[:20])
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mapped = [text for text in maps if str(bf16.directory) in text.splitlines()[0]]
    assert len(mapped) >= 2
    for text in mapped:
        assert " r--s " in text.splitlines()[0]
        assert re.search(r"Anonymous: +0 kB", text)


def small(path: Path, dtype: str, **changes: object) -> ModelFiles:
    """A random model of two layers with everything the demo model lacks, as `prepare` would leave it."""
    config = ModelConfig(
        architecture="qwen3", name="small", layers=2, heads=4, kv_heads=2, head_dim=32, hidden_size=96, ffn_size=160,
        vocab_size=101, rms_eps=1e-6, context_length=128, rope=Rope(base=500.0), qkv_bias=True, qk_norm=True,
        sliding_window=20, sliding_layers=(1,),
    )  # fmt: skip
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    rows, hidden, ffn = config.q_rows + 2 * config.kv_rows, config.hidden_size, config.ffn_size
    shapes = {"embed": (config.vocab_size, hidden), "head": (config.vocab_size, hidden), "norm": (hidden,)}
    for layer in range(config.layers):
        parts = {"input_norm": (hidden,), "qkv": (rows, hidden), "qkv_bias": (rows,), "q_norm": (config.head_dim,),
                 "k_norm": (config.head_dim,), "o": (hidden, config.q_rows), "post_norm": (hidden,),
                 "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}  # fmt: skip
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {
        name: (torch.randn(shape, generator=random) * 0.2 + ("norm" in name)).to(DTYPES[dtype])
        for name, shape in shapes.items()
    }
    path.mkdir()
    save_file(weights, path / "weights.safetensors")
    return dataclasses.replace(
        prepare("smollm2-135m", "bfloat16"), config=config, directory=path, weights=path / "weights.safetensors",
        packed=None, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.3)])
def test_native_equals_plain_torch(dtype: str, bound: float, tmp_path: Path) -> None:
    """Biases, q/k norms, a sliding window, an untied head, dense weights."""
    model_files = small(tmp_path / "small", dtype)
    logits = []
    for kernels in ("cpu", "reference"):
        model = Transformer(model_files, dtype, select(kernels), 2)
        run = PagedRun(model, layout_of(model.config, dtype), 2, 64)
        tokens = [token % 101 for token in TEXT]
        parts = [run.prefill(0, tokens[:40], list(range(40))), run.prefill(1, tokens[:9], list(range(9)))]
        logits.append(torch.cat(parts + [run.decode([0, 1], [token, token]) for token in tokens[40:50]]))
    assert (logits[0] - logits[1]).abs().max() < bound


def test_packed_file_is_written_once_and_whole(tmp_path: Path) -> None:
    model_files = small(tmp_path / "small", "bfloat16")
    first = map_panels(model_files)
    written = {path.name: path.stat().st_mtime_ns for path in model_files.directory.iterdir()}
    second = map_panels(model_files)
    assert {path.name: path.stat().st_mtime_ns for path in model_files.directory.iterdir()} == written
    assert all(torch.equal(first[name].data, second[name].data) for name in first)


def test_a_width_the_panels_cannot_hold_runs_in_torch(tmp_path: Path) -> None:
    model_files = small(tmp_path / "small", "float32", hidden_size=80)
    model = Transformer(model_files, "float32", select("cpu"), 1)
    assert model.forward is not None and model._native is None
    logits = PagedRun(model, layout_of(model.config, "float32"), 1, 16).prefill(0, [1, 2, 3])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_lesser_instruction_sets(isa: str) -> None:
    if isa == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "native_equals_plain", __file__]
    done = subprocess.run(command, env={**os.environ, "KVRELAY_CPU_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
