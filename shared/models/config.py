"""What a model is, apart from its weights: pure data, read from the cache manifest without torch or gguf."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position parameters; `shared.models.rope` turns them into frequencies.

    `factors` divide the unscaled frequencies one by one (head_dim / 2 of them): the form in which GGUF stores llama3
    scaling. Fields a kind does not use keep their defaults.
    """

    base: float = 10_000.0
    kind: RopeKind = "none"
    factor: float = 1.0
    original_context_length: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry of a decoder: RMS norms, gated SiLU, grouped-query attention, rotary positions over the whole head."""

    architecture: str
    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    rms_eps: float
    context_length: int
    rope: Rope
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """How many of the last keys, its own included, a query of `layer` sees; 0: all."""
        return self.sliding_window if layer in self.sliding_layers else 0

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelConfig:
        return cls(**{**_hashable(fields), "rope": Rope(**_hashable(fields["rope"]))})


def _hashable(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """`texts`: role → text, as chat templates see them. `eos_token_ids`: every id that ends an answer."""

    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
