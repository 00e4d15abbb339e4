"""The forward pass as one call into C (`kernels/cpu/step.c`) over packed weights.

Decode steps run to the end in C. Prefill comes back to Python once a layer, to seal, append and attend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kernels.cpu import build, geometry, packing
from kernels.cpu.attend import Decode
from kernels.cpu.linear import CLinear, PackedLinear
from kernels.cpu.step import ATTENTION, OUT_OF_RANGE, Buffers, CLayer, CModel, CStep
from kernels.dispatch import Ops
from kernels.layout import PageLayout
from shared.errors import BadRequest
from shared.models.files import ModelFiles
from shared.models.kv_step import KVStep
from shared.models.panels import map_panels, packable
from shared.models.weights import map_tensors


def nothing() -> None:
    """What most callers of `forward` have to do meanwhile."""


class NativeStep:
    """One model in C. Not reentrant: one caller at a time, as each worker has one compute thread."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, ops: Ops, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.config, self.dtype, self.ops = files.config, dtype, ops
        self._library = build.load()
        self._keep: list[object] = []  # everything C holds a pointer to
        self._model = self._describe(map_panels(files), map_tensors(files.weights), cos.contiguous(), sin.contiguous())
        self._buffers = Buffers(self._library, self._model, 1, dtype)
        self._decode_address = ctypes.cast(self._library.kv_attend_decode, ctypes.c_void_p).value
        self._calls = np.zeros(self.config.layers, dtype=np.dtype(Decode))
        self._calls["window"] = [self.config.window(layer) for layer in range(self.config.layers)]
        self._calls_for: tuple[PageLayout, object] | None = None

    @staticmethod
    def possible(files: ModelFiles, dtype: torch.dtype, ops: Ops) -> bool:
        """Whether this model can run here; if not, the plain torch pass does."""
        return ops.name == "cpu" and dtype in (torch.bfloat16, torch.float32) and packable(files.config)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: KVStep,
        logits_rows: Sequence[int] | torch.Tensor,
        meanwhile: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """As `Transformer.forward`. BadRequest for a token or position the model does not have."""
        count = tokens.numel()
        if count > self._buffers.capacity:
            self._buffers = Buffers(self._library, self._model, 1 << (count - 1).bit_length(), self.dtype)
        buffers = self._buffers
        tokens, positions = tokens.contiguous(), positions.contiguous()
        rows = torch.as_tensor(logits_rows, dtype=torch.int64)
        logits = torch.empty(rows.numel(), self.config.vocab_size)
        step = CStep(
            rows=count, logits=rows.numel(), tokens=tokens.data_ptr(), positions=positions.data_ptr(),
            logits_rows=rows.data_ptr(), logits_out=logits.data_ptr(), q=buffers.q.data_ptr(), k=buffers.k.data_ptr(),
            v=buffers.v.data_ptr(), attended=buffers.attended.data_ptr(), scratch=buffers.scratch.data_ptr(),
            capacity=buffers.capacity,
        )  # fmt: skip
        errors: list[BaseException] = []
        if kv.seal_blocks is None and kv.batch.max_query == 1 and kv.batch.kv_head_tables is None:
            self._stay_in_c(step, kv)
        else:
            step.attention = self._attention(kv, count, errors)
        meanwhile()
        result = self._library.kv_step_run(ctypes.byref(self._model), ctypes.byref(step))
        if errors:
            raise errors[0]
        if result == OUT_OF_RANGE:
            raise BadRequest(f"a token or position is beyond the model's {self.config.vocab_size} tokens "
                             f"or {self.config.context_length} positions")  # fmt: skip
        if result:
            raise MemoryError("no memory for partial attention results")
        return logits

    def _stay_in_c(self, step: CStep, kv: KVStep) -> None:
        layout, batch, calls = kv.layout, kv.batch, self._calls
        if self._calls_for is None or self._calls_for[0] is not layout or self._calls_for[1] is not kv.scales:
            addresses = [geometry.layer_scales(layout, layer, kv.scales) or 0 for layer in range(layout.layers)]
            calls["scales"] = addresses
            self._calls_for = (layout, kv.scales)
        calls["pages"] = kv.pages.data_ptr()
        calls["tails"] = kv.tails.data_ptr()
        calls["q"] = step.q
        calls["out"] = step.attended
        calls["tables"] = batch.tables.data_ptr()
        calls["page_counts"] = batch.page_counts.data_ptr()
        calls["tail_slots"] = batch.tail_slots.data_ptr()
        calls["tail_lengths"] = batch.tail_lengths.data_ptr()
        calls["query_starts"] = batch.query_starts.data_ptr()
        calls["q_stride"] = self.config.q_rows
        calls["q_kind"] = geometry.DTYPES[self.dtype]
        calls["sequences"] = len(batch)
        calls["q_heads"] = self.config.heads
        calls["table_stride"] = batch.tables.stride(0)
        calls["max_pages"] = batch.max_pages
        calls["scale"] = self.config.head_dim**-0.5
        step.decode = self._decode_address
        step.pool = ctypes.addressof(geometry.layers(layout))
        step.calls = calls.ctypes.data
        step.call_bytes = ctypes.sizeof(Decode)
        step.tails = kv.tails.data_ptr()
        step.append_slots = kv.append_slots.data_ptr()
        step.append_positions = kv.append_positions.data_ptr()

    def _attention(self, kv: KVStep, count: int, errors: list[BaseException]) -> Callable[..., int]:
        buffers = self._buffers
        q, k, v = buffers.q[:count], buffers.k[:count], buffers.v[:count]
        out = buffers.attended[:count]

        def attention(_context: int | None, layer: int) -> int:
            try:
                kv.write_and_attend(self.ops, self.config, layer, q, k, v, out)
            except BaseException as error:  # C cannot carry it; `forward` raises it
                errors.append(error)
                return 1
            return 0

        return ATTENTION(attention)

    def _describe(
        self, packed: dict[str, PackedLinear], dense: dict[str, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> CModel:
        config = self.config
        bf16 = self.dtype == torch.bfloat16
        dot = bf16 and self._library.kv_has_bf16_dot() and all(w.format != packing.F32 for w in packed.values())
        self._keep += [packed, dense, cos, sin]
        layers = (CLayer * config.layers)()
        self._keep.append(layers)
        for index, layer in enumerate(layers):
            for part in ("qkv", "o", "gate_up", "down"):
                setattr(layer, part, packed[f"layers.{index}.{part}"].struct())
            for norm in ("input_norm", "post_norm", "q_norm", "k_norm"):
                setattr(layer, norm, self._float(dense.get(f"layers.{index}.{norm}")))
        head: CLinear = packed["embed" if config.tie_embeddings else "head"].struct()
        return CModel(
            config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.ffn_size,
            config.vocab_size, bf16, dot, config.rms_eps, dense["embed"].data_ptr(), cos.data_ptr(), sin.data_ptr(),
            cos.shape[0], self._float(dense["norm"]), ctypes.addressof(layers), head,
        )  # fmt: skip

    def _float(self, weight: torch.Tensor | None) -> int | None:
        """Address of a float32 copy."""
        if weight is None:
            return None
        copy = weight.float().contiguous()
        self._keep.append(copy)
        return copy.data_ptr()
