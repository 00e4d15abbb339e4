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

import httpx

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
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def all_at_once(new_tokens: int) -> list[Stream]:
            bodies = [{"model": model, "prompt": prompt, "max_tokens": new_tokens, **extra} for prompt in prompts]
            return list(await asyncio.gather(*(_stream(client, url, body) for body in bodies)))

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


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> Stream:
    """Only takes the time while bytes arrive, and reads them afterwards: client and server share the processors."""
    started, chunks = time.perf_counter(), []
    body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    async with client.stream("POST", f"{url}/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}: {(await response.aread())[:500]!r}")
        async for chunk in response.aiter_bytes():
            chunks.append((time.perf_counter(), chunk))
    return seen(started, chunks)


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
