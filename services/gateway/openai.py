"""The OpenAI-shaped bodies of the HTTP door, in: requests become `Generate`. `answers.py` is the way out.

Unknown parameters are ignored. Known ones that we cannot honour are refused by name, never silently dropped.
Parameters beyond OpenAI's, with the names users of vLLM know: top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, cache_salt, priority, and request_id and timeout_s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from shared.errors import BadRequest
from shared.messages import Generate, Sampling
from shared.messages.client import MAX_MESSAGES

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older API
MAX_PARTS = 1024  # of one message


_MEMBER = re.compile(r"str$|function-|list\[|constrained")  # what pydantic puts in a path for a member of a union


class Refused(BadRequest):
    """A bad request that knows which parameter is to blame."""

    def __init__(self, text: str, param: str | None) -> None:
        super().__init__(text)
        self.param = param


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _text_or_parts(value: object) -> object:
    """One clear text where the union it guards would complain about each of its members."""
    if value is not None and not isinstance(value, (str, list)):
        raise ValueError("must be a text or a list of text parts")
    if isinstance(value, list) and len(value) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts")
    return value


Ids = list[Annotated[int, Field(ge=0)]]
Stop = Annotated[list[str] | None, BeforeValidator(_strings)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


Content = Annotated[str | list[TextPart] | None, BeforeValidator(_text_or_parts)]


class IncomingMessage(BaseModel):
    role: str
    content: Content = None
    tool_calls: list[Any] | None = None


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

    def _generate(
        self, *, logprobs: int | None, max_tokens: int | None, names: Mapping[str, str] | None = None, **source: Any
    ) -> Generate:
        """`names`: what the caller calls a parameter, where that is not what `Generate` calls it."""
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
        with _by_parameter(names or {}):
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

    messages: Annotated[list[IncomingMessage], Field(max_length=MAX_MESSAGES)]
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
        messages = [{"role": _role(m), "content": _content(m, n)} for n, m in enumerate(self.messages)]
        limit, names = self.max_tokens, {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            limit, names["max_tokens"] = self.max_completion_tokens, "max_completion_tokens"
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        return self._generate(logprobs=wanted, max_tokens=limit, names=names, messages=messages)


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
        prompt = body.get("prompt", "") if isinstance(body, dict) else ""
        if not isinstance(prompt, (str, list)):
            raise Refused("prompt: must be a text or a list of token ids", "prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (str, list)):
            raise Refused("prompt: only one prompt per request is supported", "prompt")
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
            prompt = prompt[0]
        if not prompt:
            raise Refused("prompt: must not be empty", "prompt")
        source: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        limit = self.max_tokens if self.max_tokens is not None else COMPLETION_MAX_TOKENS
        return self._generate(logprobs=self.logprobs, max_tokens=limit, **source)


R = TypeVar("R", ChatCompletionRequest, CompletionRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in an HTTP body. Types are strict. Raises Refused with the parameter that is wrong."""
    with _by_parameter({}):
        return kind.model_validate_json(body, strict=True)


@contextmanager
def _by_parameter(names: Mapping[str, str]) -> Iterator[None]:
    """Turns the most telling complaint of pydantic into a Refused that names the parameter, by `names` if it is there.

    A union complains once per member; the one that got furthest into the value is the one that was meant.
    """
    try:
        yield
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        problem = max(problems, key=lambda one: len(one["loc"]))  # the first of the longest
        path = [str(step) for step in problem["loc"] if not _MEMBER.match(str(step))]
        if path:
            path[0] = names.get(path[0], path[0])
        param = ".".join(path) or None
        raise Refused(f"{param or 'body'}: {problem['msg'].removeprefix('Value error, ')}", param) from None


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _role(message: IncomingMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _content(message: IncomingMessage, position: int) -> str:
    if message.tool_calls:
        param = f"messages.{position}.tool_calls"
        raise Refused(f"{param}: calling tools is not supported", param)
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise Refused(f"messages.{position}.content: must be given", f"messages.{position}.content")
    return "".join(part.text for part in message.content)
