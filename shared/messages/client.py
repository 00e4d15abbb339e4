"""What clients say to a gateway, and what they are told."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from shared.handles import as_tuple
from shared.messages.base import FinishReason, Message, RequestId

MAX_MESSAGES = 4096  # of a chat; validating many small ones holds up everybody

TokenKey = Annotated[
    int,
    BeforeValidator(lambda key: int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key),
    PlainSerializer(str),  # keys of maps travel as text: the decoder takes no others
]


class Sampling(Message):
    """How the next token is chosen. `temperature` 0 is greedy; ties go to the lowest token id."""

    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, lt=2**31, description="0: off")
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=1024
    )
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="how many alternatives; 0: the chosen token only"
    )


class ChatMessage(Message):
    role: str = Field(min_length=1, max_length=32)
    content: str


class Generate(Message):
    """`gateway.generate`: exactly one of `prompt`, `messages`, `token_ids`."""

    request_id: RequestId | None = None
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, max_length=MAX_MESSAGES)
    token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1, description="default: what is left of the context")
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list, max_length=16)
    sampling: Sampling = Sampling()
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="lower is served first")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)


class Usage(Message):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TokenLogprob(Message):
    token_id: int
    logprob: float
    top: list[Annotated[tuple[int, float], BeforeValidator(as_tuple)]] = Field(default_factory=list)


class Timings(Message):
    """Seconds. `compute_s` is the model time of prefill up to the first token; the rest of TTFT is control plane."""

    queued_s: float = 0.0
    ttft_s: float = 0.0
    compute_s: float = 0.0
    total_s: float = 0.0
    tokens_per_s: float = 0.0


class Generated(Message):
    """One event of a stream, or the only answer. `text` and `token_ids` are deltas in a stream and whole otherwise.

    The last event of a stream carries `finish_reason`, `usage`, `timings`, `actors` and no text of its own.
    """

    request_id: str
    trace_id: str
    text: str = ""
    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = Field(default=None, description="the stop string or token id that ended it")
    usage: Usage | None = None
    timings: Timings | None = None
    actors: list[str] | None = Field(default=None, description="instances that handled it, in order")
    pages: int | None = Field(default=None, description="pages of the sequence at its end")
    attempts: int | None = None


class Cancel(Message):
    """`gateway.cancel`. Unknown and finished ids are answered `CancelResult(found=False)`; twice is harmless."""

    request_id: RequestId


class CancelResult(Message):
    found: bool


class ModelCard(Message):
    """`gateway.model`: what this pipeline serves."""

    name: str
    architecture: str
    context_length: int
    vocab_size: int
    dtype: str
    k_format: str
    v_format: str
