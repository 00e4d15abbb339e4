"""Load through an OpenAI-shaped HTTP API: the same client for kvrelay and for its peers.

Every prompt is made of fresh random words, so that no engine has it cached the first time; the second time all have.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

_LIMIT_S = 600.0
_WORDS = ["river", "stone", "window", "garden", "winter", "paper", "silver", "engine", "morning", "letter", "forest",
          "bridge", "mountain", "kitchen", "music"]  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """`streams` requests at once, each `context` prompt tokens (about) and `new_tokens` to generate."""

    name: str
    streams: int
    context: int
    new_tokens: int


@dataclass
class Stream:
    """What one client saw. Times are `time.perf_counter` seconds."""

    started: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """`prefill_tok_s`: all prompts, fresh, over the time to the last first token. `decode_tok_s`: the same prompts
    again, now cached, counted while every stream was decoding, so that no prompt is being computed beside it."""

    decode_tok_s: float
    prefill_tok_s: float
    ttft_s: float
    prompt_tokens: int
    completion_tokens: int


def random_prompt(words: int, seed: int) -> str:
    """`words` common English words, different for each seed; about one token a word in most vocabularies."""
    source = random.Random(seed)
    return " ".join(source.choice(_WORDS) for _ in range(words))


async def run(url: str, model: str, scenario: Scenario, extra: dict[str, object], seed: int) -> Figures:
    """Runs the scenario once against the API at `url` (".../v1"): the prompts alone, then with continuations."""
    prompts = [random_prompt(scenario.context, seed * 1000 + number) for number in range(scenario.streams)]

    async def all_at_once(new_tokens: int) -> list[Stream]:
        bodies = [{"model": model, "prompt": prompt, "max_tokens": new_tokens, **extra} for prompt in prompts]
        return list(await asyncio.gather(*(_stream(f"{url}/completions", body) for body in bodies)))

    fresh, cached = await all_at_once(1), await all_at_once(scenario.new_tokens)
    return reduce(fresh, cached)


def reduce(fresh: list[Stream], cached: list[Stream]) -> Figures:
    """The decode window reaches from the last first token to the first last token."""
    begin = max(stream.arrivals[0] for stream in cached)
    end = min(stream.arrivals[-1] for stream in cached)
    if end <= begin:
        raise RuntimeError("the streams never decoded together: ask for more new tokens")
    inside = sum(1 for stream in cached for moment in stream.arrivals if begin < moment <= end)
    tokens_per_event = sum(s.completion_tokens for s in cached) / sum(len(s.arrivals) for s in cached)
    prompt_tokens = sum(stream.prompt_tokens for stream in fresh)
    first = [stream.arrivals[0] for stream in fresh]
    return Figures(
        decode_tok_s=inside * tokens_per_event / (end - begin),
        prefill_tok_s=prompt_tokens / (max(first) - min(stream.started for stream in fresh)),
        ttft_s=min(first) - min(stream.started for stream in fresh),
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(stream.completion_tokens for stream in cached),
    )


class _Arrivals(asyncio.Protocol):
    """Takes the time of what arrives until the server closes, and does nothing else: it shares the processors."""

    def __init__(self) -> None:
        self.chunks: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if error is not None:
            self.closed.set_exception(error)
        else:
            self.closed.set_result(None)


async def _stream(url: str, body: dict[str, object]) -> Stream:
    """Asks with `body` on a connection of its own, and reads what came when it has ended."""
    body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    content, where, http = json.dumps(body).encode(), urlsplit(url), h11.Connection(h11.CLIENT)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    fields = {"host": where.netloc, "content-type": "application/json", "content-length": str(len(content))}
    request = h11.Request(method="POST", target=where.path, headers=[*fields.items(), ("connection", "close")])
    message = [http.send(event) for event in (request, h11.Data(data=content), h11.EndOfMessage())]
    async with asyncio.timeout(_LIMIT_S):
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        transport, arrivals = await loop.create_connection(_Arrivals, host, port)
        transport.write(b"".join(part for part in message if part is not None))
        try:
            await arrivals.closed
        finally:
            transport.close()
    return seen(started, list(_content(url, http, arrivals.chunks)))


def _content(url: str, http: h11.Connection, chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The bytes of the answer's body, as they came. RuntimeError if it is not a 200; h11's error if it is not whole."""
    status, text = 0, b""
    for moment, event in _http_events(http, chunks):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status == 200:
            yield moment, bytes(event.data)
        elif isinstance(event, h11.Data):
            text += bytes(event.data)
    if status != 200:
        raise RuntimeError(f"{url} answered {status}: {text[:500]!r}")


def _http_events(http: h11.Connection, chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, h11.Event]]:
    for moment, chunk in [*chunks, (time.perf_counter(), b"")]:
        http.receive_data(chunk)
        while isinstance(event := http.next_event(), h11.Event):
            if isinstance(event, h11.EndOfMessage):
                return
            yield moment, event


def seen(started: float, chunks: list[tuple[float, bytes]]) -> Stream:
    """What a client saw of a stream of server-sent events, given (moment, bytes) as they arrived."""
    stream = Stream(started)
    for moment, event in _events(chunks):
        if event.get("usage"):
            stream.prompt_tokens = event["usage"]["prompt_tokens"]
            stream.completion_tokens = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("text"):
            stream.arrivals.append(moment)
    if not stream.arrivals:
        raise RuntimeError("no token was streamed")
    if not stream.completion_tokens:  # servers without a usage chunk send one token an event
        stream.completion_tokens = len(stream.arrivals)
    return stream


def _events(chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events, each with the moment its line was complete."""
    rest = b""
    for moment, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield moment, json.loads(line[6:])
