"""The forward pass of Llama-family decoders over paged keys and values, in plain torch and the ops of one backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.cpu import build
from kernels.dispatch import Ops, reference_ops
from kernels.reference.linear import linear
from shared.models.files import ModelFiles
from shared.models.graphs import DecodeGraphs
from shared.models.kv_step import KVStep
from shared.models.native import NativeStep, nothing
from shared.models.rope import inverse_frequencies
from shared.models.weights import map_tensors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Transformer:
    """One model on one device. The residual stream is float32, everything else the compute dtype.

    On a GPU `forward` takes tensors of the host as well as of the device, and returns before anything is computed: what
    reads its logits waits for them, and `Memory.fence` for what is written into pages and tails.
    """

    def __init__(self, files: ModelFiles, dtype: str, ops: Ops, threads: int, device: str = "cpu") -> None:
        self.config = files.config
        self.dtype = DTYPES[dtype]
        self.ops = ops
        self.threads = threads
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        self._weights = {name: weight.to(self.device) for name, weight in map_tensors(files.weights).items()}
        self._head = self._weights["embed" if self.config.tie_embeddings else "head"]
        self._cos, self._sin = (table.to(self.device) for table in self._rotations())
        self._rows = ops if ops.name == "triton" else reference_ops()
        captured = self.device.type == "cuda" and ops.name == "triton"  # the reference looks at values on the host
        self._graphs = DecodeGraphs(self.device, self._compute) if captured else None
        self._native: NativeStep | None = None
        if NativeStep.possible(files, self.dtype, ops):
            build.set_threads(threads)
            self._native = NativeStep(files, self.dtype, ops, self._cos, self._sin)

    def _rotations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [context_length, head_dim/2]."""
        frequencies, factor = inverse_frequencies(self.config)
        angles = torch.outer(torch.arange(self.config.context_length).float(), torch.from_numpy(frequencies))
        return angles.cos() * factor, angles.sin() * factor

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: KVStep,
        logits_rows: Sequence[int] | torch.Tensor,
        meanwhile: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """Writes the keys and values of `tokens` (int64 [T], at absolute `positions`, int64 [T]) as `kv` says.

        Returns float32 logits [len(logits_rows), vocab] of those rows, on the model's device, until the next call; none
        are computed for an empty list. `meanwhile` is called once: when a CUDA graph has been launched, otherwise just
        before the pass computes.
        """
        if self._native is not None:
            return self._native.forward(tokens, positions, kv, logits_rows, meanwhile)
        rows = torch.as_tensor(logits_rows, dtype=torch.int64)
        if self._graphs is not None and DecodeGraphs.possible(kv, tokens.numel(), rows.numel()):
            logits = self._graphs.run(tokens, positions, kv)
            meanwhile()
            return logits
        meanwhile()
        here = self.device
        return self._compute(tokens.to(here), positions.to(here), kv.to(here), rows.to(here))

    def _compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, kv: KVStep, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """`forward` with everything on the device, waiting for nothing."""
        config, weights, rms_norm, silu_mul = self.config, self._weights, self._rows.rms_norm, self._rows.silu_mul
        hidden = weights["embed"][tokens].float()
        cos, sin = self._cos[positions], self._sin[positions]
        for layer in range(config.layers):
            prefix = f"layers.{layer}."
            x = rms_norm(hidden, weights[prefix + "input_norm"], config.rms_eps)
            attended = self._attention(x, cos, sin, kv, layer, prefix)
            x = rms_norm(attended, weights[prefix + "post_norm"], config.rms_eps, residual=hidden)
            hidden += linear(silu_mul(linear(x, weights[prefix + "gate_up"])), weights[prefix + "down"])
        return linear(rms_norm(hidden[logits_rows], weights["norm"], config.rms_eps), self._head).float()

    def _attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVStep, layer: int, prefix: str
    ) -> torch.Tensor:
        config, weights, rows, rms_norm = self.config, self._weights, x.shape[0], self._rows.rms_norm
        qkv = linear(x, weights[prefix + "qkv"], weights.get(prefix + "qkv_bias"))
        qkv = qkv.view(rows, config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
        if config.qk_norm:
            q = rms_norm(q, weights[prefix + "q_norm"], config.rms_eps)
            k = rms_norm(k, weights[prefix + "k_norm"], config.rms_eps)
        self._rows.rope(q, k, cos, sin)
        attended = kv.write_and_attend(self.ops, config, layer, q, k, v)
        return linear(attended.reshape(rows, -1), weights[prefix + "o"])
