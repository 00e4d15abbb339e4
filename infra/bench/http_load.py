"""Load through an OpenAI-shaped HTTP API: the same client for kvrelay and for its peers.

Every prompt is made of fresh random words, so that no engine can answer from a prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

_WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "winter",
    "paper",
    "silver",
    "engine",
    "morning",
    "letter",
    "forest",
    "bridge",
    "mountain",
    "kitchen",
    "music",
]


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
    """`decode_tok_s`: tokens that arrived while every stream was decoding; `prefill_tok_s`: prompt over TTFT."""

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
    """Runs the scenario once against the API at `url` (".../v1") and reduces what the clients saw."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        streams = await asyncio.gather(
            *(
                _stream(client, url, model, scenario, extra, random_prompt(scenario.context, seed * 1000 + number))
                for number in range(scenario.streams)
            )
        )
    return reduce(streams)


def reduce(streams: list[Stream]) -> Figures:
    """Rates over the window in which all streams decode: from the last first token to the first last token."""
    begin = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    inside = sum(1 for stream in streams for moment in stream.arrivals if begin < moment <= end)
    events = sum(len(stream.arrivals) for stream in streams)
    tokens_per_event = sum(stream.completion_tokens for stream in streams) / events
    prompt_tokens = sum(stream.prompt_tokens for stream in streams)
    started = min(stream.started for stream in streams)
    return Figures(
        decode_tok_s=inside * tokens_per_event / (end - begin) if end > begin else 0.0,
        prefill_tok_s=prompt_tokens / (begin - started),
        ttft_s=min(stream.arrivals[0] - stream.started for stream in streams),
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(stream.completion_tokens for stream in streams),
    )


async def _stream(
    client: httpx.AsyncClient, url: str, model: str, scenario: Scenario, extra: dict[str, object], prompt: str
) -> Stream:
    seen = Stream(started=time.perf_counter())
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": scenario.new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    async with client.stream("POST", f"{url}/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                seen.prompt_tokens = event["usage"]["prompt_tokens"]
                seen.completion_tokens = event["usage"]["completion_tokens"]
            if event.get("choices") and event["choices"][0].get("finish_reason") is None:
                seen.arrivals.append(time.perf_counter())
    if not seen.arrivals:
        raise RuntimeError(f"{url} streamed no token")
    if not seen.completion_tokens:  # servers without a usage chunk send one token an event
        seen.completion_tokens = len(seen.arrivals)
    return seen
