"""The OpenAI-shaped bodies of the HTTP door, out: answers, chunks, errors. Pure.

A stream of chunks obeys what clients rely on: chat begins with a role delta, `finish_reason` is null in every chunk but
the last, that chunk has no content, and usage comes after it in a chunk without choices.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from shared.errors import BadRequest, KvrelayError, TooLarge
from shared.messages import Generated, TokenLogprob, Usage

Api = Literal["chat", "completions"]
_OBJECT = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completions", False): "text_completion",
    ("completions", True): "text_completion",
}
_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-"}
_TYPE = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error",
         409: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}  # fmt: skip


class Pieces(Protocol):
    """What log-probabilities need of the tokenizer."""

    def token_bytes(self, token: int) -> bytes: ...


class Answers:
    """Builds the bodies of one request of one API."""

    def __init__(self, api: Api, model: str, request_id: str, created: int, pieces: Pieces) -> None:
        self._api = api
        self._model = model
        self._id = _PREFIX[api] + request_id
        self._created = created
        self._pieces = pieces
        self._offset = 0  # characters of text before the next log-probability

    def whole(self, answer: Generated) -> dict[str, Any]:
        """The body of a request without `stream`."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        if self._api == "chat":
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        choice["logprobs"] = self._logprobs(answer.logprobs)
        usage = usage_body(answer.usage) if answer.usage is not None else None
        return {**self._frame(False), "choices": [choice], "usage": usage, "kvrelay": _extra(answer)}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with, if anything."""
        return self._chunk({"role": "assistant", "content": ""}) if self._api == "chat" else None

    def delta(self, event: Generated) -> dict[str, Any] | None:
        """A chunk of text; None when there is nothing to show yet."""
        if not event.text and not event.logprobs:
            return None
        logprobs = self._logprobs(event.logprobs)
        return self._chunk({"content": event.text} if self._api == "chat" else event.text, logprobs)

    def last(self, event: Generated) -> dict[str, Any]:
        """The chunk with `finish_reason`."""
        chunk = self._chunk({} if self._api == "chat" else "", None, event.finish_reason)
        chunk["choices"][0]["stop_reason"] = event.stop_reason
        return {**chunk, "kvrelay": _extra(event)}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return {**self._frame(True), "choices": [], "usage": usage_body(usage)}

    def _frame(self, streaming: bool) -> dict[str, Any]:
        kind = _OBJECT[self._api, streaming]
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, content: Any, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self._api == "chat" else "text": content}
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._frame(True), "choices": [choice]}

    def _logprobs(self, items: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if items is None:
            return None
        if self._api == "chat":
            return {"content": [{**self._entry(i.token_id, i.logprob), "top_logprobs": self._top(i)} for i in items]}
        offsets = []
        for item in items:
            offsets.append(self._offset)
            self._offset += len(self._token(item.token_id))
        return {
            "tokens": [self._token(item.token_id) for item in items],
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{self._token(token): value for token, value in item.top} for item in items],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> list[dict[str, Any]]:
        return [self._entry(token, value) for token, value in item.top]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token), "logprob": logprob, "bytes": list(self._pieces.token_bytes(token))}

    def _token(self, token: int) -> str:
        return self._pieces.token_bytes(token).decode(errors="replace")


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's form of it, with `cached_tokens` where OpenAI has it and on top, where people look for it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def status_of(error: KvrelayError) -> int:
    """HTTP status. What can never fit is OpenAI's plain 400, which clients know how to read."""
    return 400 if isinstance(error, TooLarge) else error.code


def error_body(error: KvrelayError) -> dict[str, Any]:
    """OpenAI's error object."""
    if hasattr(error, "param"):
        param = error.param
    else:  # texts about a field begin with its path
        word, colon, _ = error.text.partition(":")
        known = colon and " " not in word and error.code in (400, 404, 409, 413)
        param = word.removeprefix("sampling.") if known else None
    if isinstance(error, TooLarge):
        code = "context_length_exceeded"
    else:
        code = "bad_request" if isinstance(error, BadRequest) else _snake(type(error).__name__)
    kind = _TYPE.get(error.code, "server_error")
    return {"error": {"message": error.text, "type": kind, "param": param, "code": code}}


def _snake(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")


def _extra(event: Generated) -> dict[str, Any]:
    """What is kvrelay's own, under one key that other clients ignore."""
    fields = {"request_id", "trace_id", "timings", "actors", "pages", "attempts"}
    return event.model_dump(include=fields)
