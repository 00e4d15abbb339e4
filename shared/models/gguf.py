"""A GGUF file as a source of configuration and weights.

llama.cpp's converters reorder the rows of q and k for interleaved rotation in some architectures; everything read here
is back in the order of rotated halves.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import Misconfigured
from shared.models.architecture import Part, load
from shared.models.config import ModelConfig, Rope
from shared.models.fields import Fields

MAGIC = b"GGUF"
# What a damaged header makes the gguf package raise.
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeError, struct.error, MemoryError)
# (codes, bytes per block of 32 weights) kept for packed.safetensors.
PACKED_BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_DENSE = ("F32", "F16", "BF16", "F64")
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufSource:
    """Opens `path` and checks its header. Misconfigured: not GGUF, damaged, split, unknown architecture."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise Misconfigured(f"{path}: not a GGUF file")
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except _DAMAGE as error:
            raise Misconfigured(f"{path}: truncated or damaged GGUF file ({error})") from error
        self._dequantize = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.fields = Fields(str(path), self.metadata)
        if self.fields.integer("split.count", 1) > 1:
            raise Misconfigured(f"{path}: one part of a split model; join it with `llama-gguf-split --merge`")
        self.architecture = self.fields.text("general.architecture")
        self._interleaved = load(self.architecture).gguf_interleaved_rope

    # --- configuration

    def config(self) -> ModelConfig:
        """Misconfigured names the metadata field that is missing, ill-typed or unsupported."""
        spec, key = load(self.architecture), f"{self.architecture}."
        fields = self.fields
        if key + "expert_count" in fields and fields.integer(key + "expert_count", minimum=0) > 0:
            raise Misconfigured(f"{self.path}: mixture-of-experts models are not supported")
        heads, hidden = fields.integer(key + "attention.head_count"), fields.integer(key + "embedding_length")
        rotated = fields.integer(key + "rope.dimension_count", 0)
        head_dim = fields.integer(key + "attention.key_length", rotated or hidden // heads)
        rotated = rotated or head_dim
        if head_dim != rotated or fields.integer(key + "attention.value_length", head_dim) != head_dim:
            raise Misconfigured(f"{self.path}: heads with keys, values and rotation of unequal size are not supported")
        layers = fields.integer(key + "block_count")
        window = fields.integer(key + "attention.sliding_window", 0, minimum=0) if spec.sliding == "all" else 0
        config = ModelConfig(
            architecture=self.architecture,
            name=fields.text("general.name", self.path.stem),
            layers=layers,
            heads=heads,
            kv_heads=fields.integer(key + "attention.head_count_kv", heads),
            head_dim=head_dim,
            hidden_size=hidden,
            ffn_size=fields.integer(key + "feed_forward_length"),
            vocab_size=self.shape("token_embd.weight")[0],
            rms_eps=fields.number(key + "attention.layer_norm_rms_epsilon"),
            context_length=fields.integer(key + "context_length"),
            rope=self._rope(key, head_dim),
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias=spec.qkv_bias,
            qk_norm=spec.qk_norm,
            sliding_window=window,
            sliding_layers=tuple(range(layers)) if window else (),
        )
        if config.heads % config.kv_heads or config.head_dim % 2:
            raise Misconfigured(f"{self.path}: {heads} heads over {config.kv_heads} key-value heads do not fit")
        return config

    def _rope(self, key: str, head_dim: int) -> Rope:
        fields, scaling = self.fields, key + "rope.scaling."
        base = fields.number(key + "rope.freq_base", 10_000.0)
        factor = fields.number(scaling + "factor", 1.0)
        context = fields.integer(key + "context_length")
        original = fields.integer(scaling + "original_context_length", context)
        attention = fields.optional_number(scaling + "attn_factor")
        kind = fields.text(scaling + "type", "none")
        if "rope_freqs.weight" in self._tensors:
            return Rope(base, "factors", factors=self._factors("rope_freqs.weight", head_dim))
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return Rope(base)
        if kind == "linear":
            return Rope(base, "linear", factor)
        if kind == "yarn":
            fast, slow = fields.number(scaling + "yarn_beta_fast", 32.0), fields.number(scaling + "yarn_beta_slow", 1.0)
            # GGUF's attn_factor multiplies YaRN's own factor instead of replacing it.
            own = None if attention is None else attention * (1.0 + 0.1 * float(np.log(max(factor, 1.0))))
            return Rope(base, "yarn", factor, original, attention_factor=own, beta_fast=fast, beta_slow=slow)
        if kind == "longrope":
            short, long = (self._factors(f"rope_factors_{side}.weight", head_dim) for side in ("short", "long"))
            factor = context / original
            return Rope(
                base, "longrope", factor, original, attention_factor=attention, short_factors=short, long_factors=long
            )
        raise Misconfigured(f"{self.path}: rope scaling {kind!r} is not supported")

    def _factors(self, name: str, head_dim: int) -> tuple[float, ...]:
        if self.shape(name) != (head_dim // 2,):
            raise Misconfigured(f"{self.path}: tensor {name!r} must hold {head_dim // 2} factors")
        return tuple(float(value) for value in self._tensors[name].data)

    # --- tensors

    def part_name(self, part: Part) -> str:
        return part.gguf

    def names(self) -> set[str]:
        """Tensors a model must account for: rope tables, which the configuration holds, are left out."""
        return set(self._tensors) - set(_IGNORED)

    def shape(self, name: str) -> tuple[int, ...]:
        """[rows, columns] or [rows], as torch counts. Misconfigured if there is no such tensor."""
        if name not in self._tensors:
            raise Misconfigured(f"{self.path}: tensor {name!r} is missing")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def kind(self, name: str) -> str:
        """The GGUF type of a tensor, such as `Q4_1`."""
        return str(self._tensors[name].tensor_type.name)

    def read(self, part: Part, start: int, stop: int) -> np.ndarray:
        """float32 rows `start:stop` of `part`, dequantised. Misconfigured for a type the gguf package cannot read."""
        tensor, rows = self._tensors[part.gguf], self._rows(part, start, stop)
        kind = tensor.tensor_type
        if kind.name in _DENSE and kind.name != "BF16":
            return np.asarray(tensor.data[rows], dtype=np.float32)
        try:
            values = self._dequantize(np.ascontiguousarray(tensor.data[rows]), kind)
        except NotImplementedError as error:
            raise Misconfigured(
                f"{self.path}: tensor {part.gguf!r} has unsupported quantisation {kind.name}; "
                "use a file of the same model in Q4_0, Q4_1, Q8_0, a K-quant such as Q4_K_M, or F16"
            ) from error
        return np.asarray(values, dtype=np.float32).reshape(stop - start, *part.shape[1:])

    def blocks(self, part: Part, start: int, stop: int) -> np.ndarray:
        """u8 [rows, blocks, bytes per block]: the quantised blocks of rows `start:stop` of `part`."""
        tensor = self._tensors[part.gguf]
        raw = np.ascontiguousarray(tensor.data[self._rows(part, start, stop)])
        return raw.reshape(stop - start, -1, PACKED_BLOCKS[tensor.tensor_type.name])

    def _rows(self, part: Part, start: int, stop: int) -> np.ndarray | slice:
        """Where rows `start:stop`, counted in halves order, lie in the file."""
        if not (self._interleaved and part.heads):
            return slice(start, stop)
        half = part.shape[0] // part.heads // 2
        order = np.arange(part.shape[0]).reshape(part.heads, half, 2).swapaxes(1, 2).ravel()
        return order[start:stop]
