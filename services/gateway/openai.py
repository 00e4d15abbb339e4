"""The OpenAI-shaped bodies of the HTTP door, in: requests become `Generate`. `answers.py` is the way out.

Unknown parameters are ignored. Known ones that we cannot honour are refused by name, never silently dropped.
Parameters beyond OpenAI's, with the names users of vLLM know: top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, cache_salt, priority, and request_id and timeout_s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from shared.errors import BadRequest
from shared.messages import ChatMessage, Generate, Sampling

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older API


class Refused(BadRequest):
    """A bad request that knows which parameter is to blame."""

    def __init__(self, text: str, param: str | None) -> None:
        super().__init__(text)
        self.param = param


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


Ids = list[Annotated[int, Field(ge=0)]]
Stop = Annotated[list[str] | None, BeforeValidator(_strings)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class IncomingMessage(BaseModel):
    role: str
    content: str | list[TextPart] | None = None


class _Common(BaseModel):
    """Parameters of both APIs. None means not given, as in OpenAI's own clients."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop = None
    n: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    timeout_s: float | None = None

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _generate(self, *, logprobs: int | None, max_tokens: int | None, **source: Any) -> Generate:
        if self.n not in (None, 1):
            raise Refused(f"n: only 1 answer per request is supported, not {self.n}", "n")
        sampling = _given(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == -1 else self.top_k,  # vLLM's "off"
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._logit_bias(),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed if self.seed is None else self.seed % 2**63,  # OpenAI allows any integer
            logprobs=logprobs,
        )
        fields = _given(
            request_id=self.request_id,
            model=self.model or None,
            stream=self.stream,
            max_tokens=max_tokens,
            stop=self.stop,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_s=self.timeout_s,
            **source,
        )
        with _by_parameter():
            return Generate(sampling=Sampling(**sampling), **fields)

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise Refused(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
        return {int(key): bias for key, bias in self.logit_bias.items()}


class ChatCompletionRequest(_Common):
    """`POST /v1/chat/completions`."""

    messages: list[IncomingMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def generate(self) -> Generate:
        """Raises Refused for what we cannot do."""
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise Refused(f"{name}: calling tools is not supported", name)
        if (self.response_format or {}).get("type", "text") != "text":
            raise Refused("response_format: only text is supported", "response_format")
        if self.modalities not in (None, ["text"]):
            raise Refused("modalities: only text is supported", "modalities")
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs: needs logprobs to be true", "top_logprobs")
        messages = [ChatMessage(role=_role(m), content=_content(m, n)) for n, m in enumerate(self.messages)]
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        return self._generate(logprobs=wanted, max_tokens=limit, messages=messages)


class CompletionRequest(_Common):
    """`POST /v1/completions`."""

    prompt: str | Ids | list[str] | list[Ids]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, body: Any) -> Any:
        """One clear text where the union above would complain about each of its members."""
        prompt = body.get("prompt") if isinstance(body, dict) else ""
        if prompt is not None and not isinstance(prompt, (str, list)):
            raise Refused("prompt: must be a text or a list of token ids", "prompt")
        return body

    def generate(self) -> Generate:
        """Raises Refused for what we cannot do."""
        if self.echo:
            raise Refused("echo: not supported", "echo")
        if self.best_of not in (None, 1):
            raise Refused("best_of: only 1 is supported", "best_of")
        if self.suffix:
            raise Refused("suffix: not supported", "suffix")
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Refused("prompt: only one prompt per request is supported", "prompt")
            prompt = prompt[0]
        source: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        limit = self.max_tokens if self.max_tokens is not None else COMPLETION_MAX_TOKENS
        return self._generate(logprobs=self.logprobs, max_tokens=limit, **source)


R = TypeVar("R", ChatCompletionRequest, CompletionRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in an HTTP body. Types are strict. Raises Refused with the parameter that is wrong."""
    with _by_parameter():
        return kind.model_validate_json(body, strict=True)


@contextmanager
def _by_parameter() -> Iterator[None]:
    """Turns the first complaint of pydantic into a Refused that names the parameter."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(step) for step in problem["loc"] if not str(step).startswith(("function-", "list[", "constrained"))]
        param = ".".join(path) or None
        raise Refused(f"{param or 'body'}: {problem['msg']}", param) from None


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _role(message: IncomingMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _content(message: IncomingMessage, position: int) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise Refused(f"messages.{position}.content: must be given", f"messages.{position}.content")
    return "".join(part.text for part in message.content)
