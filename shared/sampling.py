"""Choosing the next token of one sequence, and deciding whether it was the last.

Order of operations, as in vLLM: mask of `min_tokens`, `logit_bias`, repetition, frequency and presence penalties, then
greedy, or temperature, `min_p`, `top_k`, `top_p` and one draw. Log-probabilities are those of the raw logits.

The draw goes down a tree: to one of at most 64 ranges of ids, in proportion to their weights, then to one of its
ranges, and so on to an id, each time at a uniform number that is a hash of (seed, index of the emitted token, level).
The result depends on nothing but the logits, the seed and the index: not on the batch, the worker or the attempt. A
rounding difference of ε in the weights moves each border that a draw is compared with by about ε; in a tree these are
some hundred and not one for each id, most of which weigh less than ε.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shared.handles import unpack_u32
from shared.messages import FinishReason, Sampling, TokenLogprob, Work

GREEDY_BELOW = 1e-5
_FAN_OUT = 64


class Choice(NamedTuple):
    token: int
    logprob: TokenLogprob | None = None


class Finish(NamedTuple):
    reason: FinishReason
    stop_reason: int | None = None


def uniform(seed: int, index: int, level: int = 0) -> float:
    """A number in [0, 1) with 53 random bits; a pure function of its arguments."""
    key = struct.pack("<QQ", seed % 2**64, index)
    digest = hashlib.blake2b(key, digest_size=8, salt=struct.pack("<Q", level)).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def seed_of(request_id: str) -> int:
    """The seed of a request that names none: stable over attempts and workers, as retries need it."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1


class Sampler:
    """The sampling state of one sequence: what was asked for, what has been emitted.

    `tokens` are the prompt followed by what earlier attempts emitted; `max_tokens` counts emitted tokens over all
    attempts and `max_model_len` all tokens. Ids outside the vocabulary, in `logit_bias` or stop ids, have no effect.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        request_id: str,
        tokens: Sequence[int] | np.ndarray,
        prompt_tokens: int,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        self.sampling = sampling
        self.length = len(tokens)
        self.emitted = self.length - prompt_tokens
        self._seed = seed_of(request_id) if sampling.seed is None else sampling.seed
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stops = frozenset(sampling.stop_token_ids)
        self._masked = np.array(sorted(i for i in self._eos | self._stops if i < vocab_size), dtype=np.int64)
        bias = {i: b for i, b in sampling.logit_bias.items() if 0 <= i < vocab_size}
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self.greedy = sampling.temperature < GREEDY_BELOW
        self._penalties: Penalties | None = None
        if sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            ids = np.asarray(tokens, dtype=np.int64)
            self._penalties = Penalties(sampling, ids[:prompt_tokens], ids[prompt_tokens:])
        self._plain_from = sampling.min_tokens if len(self._masked) else 0
        if not self.greedy or self._penalties or len(bias) or sampling.logprobs is not None:
            self._plain_from = 2**63

    @classmethod
    def of(cls, work: Work, *, vocab_size: int, max_model_len: int) -> Sampler:
        """The state of a piece of work as it is handed to a worker."""
        return cls(
            work.sampling,
            request_id=work.request_id,
            tokens=unpack_u32(work.tokens),
            prompt_tokens=work.prompt_tokens,
            eos_token_ids=work.eos_token_ids,
            vocab_size=vocab_size,
            max_tokens=work.max_tokens,
            max_model_len=max_model_len,
        )

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the argmax of the raw logits."""
        return self.emitted >= self._plain_from

    def choose(self, row: np.ndarray) -> Choice:
        """The next token for logits `row`, float32 [vocab]; `row` is not changed. Does not count it: see `accept`."""
        logits = self._processed(row)
        token = int(logits.argmax()) if self.greedy else self._draw(logits)
        top = self.sampling.logprobs
        return Choice(token, None if top is None else token_logprob(row, token, top))

    def accept(self, token: int) -> Finish | None:
        """Counts `token` as emitted; says whether and why it is the last one."""
        self.emitted += 1
        self.length += 1
        if self._penalties is not None:
            self._penalties.count(token)
        if self.emitted >= self.sampling.min_tokens:
            if token in self._eos:
                return Finish("stop")
            if token in self._stops:
                return Finish("stop", token)
        if self.emitted >= self._max_tokens or self.length >= self._max_model_len:
            return Finish("length")
        return None

    @property
    def remaining(self) -> int:
        """How many more tokens may be emitted at most."""
        return min(self._max_tokens - self.emitted, self._max_model_len - self.length)

    def _processed(self, row: np.ndarray) -> np.ndarray:
        masks = self.emitted < self.sampling.min_tokens and len(self._masked) > 0
        if not (masks or len(self._bias_ids) or self._penalties):
            return row
        logits = row.copy()
        if masks:
            logits[self._masked] = -np.inf
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits)
        return logits

    def _draw(self, logits: np.ndarray) -> int:
        s = self.sampling
        weights = (logits - logits.max()) / np.float32(s.temperature)
        np.exp(weights, out=weights)  # relative to the most likely token, whose weight is 1
        if s.min_p > 0:
            weights[weights < s.min_p] = 0
        if 0 < s.top_k < len(weights):
            at = len(weights) - s.top_k
            weights[weights < np.partition(weights, at)[at]] = 0
        ids = nucleus(weights, s.top_p) if s.top_p < 1 else None
        return draw(weights, ids, lambda level: uniform(self._seed, self.emitted, level))


class Penalties:
    """vLLM's penalties on the ids that occurred, kept as arrays that grow by one id at a time.

    Repetition: logits of ids in prompt or output are divided (positive) or multiplied (negative) by the penalty.
    Frequency and presence: output ids lose `frequency · count + presence`.
    """

    def __init__(self, sampling: Sampling, prompt: np.ndarray, emitted: np.ndarray) -> None:
        self._repetition = np.float32(sampling.repetition_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        seen = np.unique(np.concatenate([prompt, emitted])).astype(np.int64)
        self._ids = np.zeros(max(64, 2 * len(seen)), dtype=np.int64)
        self._ids[: len(seen)] = seen
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._at = {int(token): i for i, token in enumerate(seen)}
        for token in emitted.tolist():
            self._counts[self._at[token]] += 1

    def count(self, token: int) -> None:
        """Notes that `token` was emitted."""
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[at] = token
        self._counts[at] += 1

    def apply(self, logits: np.ndarray) -> None:
        """Changes `logits`, float32 [vocab], in place."""
        ids, counts = self._ids[: len(self._at)], self._counts[: len(self._at)]
        values = logits[ids]
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        logits[ids] = values


def nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending ids of the fewest most likely tokens that hold `top_p` of the weight; at least one; low ids win ties.

    Sorts only the ids above the highest threshold, in powers of four below the maximum, that hold enough weight.
    """
    target = top_p * float(weights.sum(dtype=np.float64))
    threshold = float(weights.max())
    while True:
        threshold = threshold / 4 if threshold > 1e-37 else 0.0
        candidates = np.flatnonzero(weights >= threshold)
        if threshold == 0.0 or float(weights[candidates].sum(dtype=np.float64)) >= target:
            break
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    kept = min(int(np.searchsorted(cumulative, target)) + 1, len(order))
    return np.sort(order[:kept])


def draw(weights: np.ndarray, ids: np.ndarray | None, number: Callable[[int], float]) -> int:
    """An id in proportion to its weight; only `ids`, if given. `number(level)` in [0, 1) decides at each level."""
    if ids is not None:
        weights = weights[ids]
    start = level = 0
    while len(weights) > _FAN_OUT:
        width = -(-len(weights) // _FAN_OUT)
        ranges = np.add.reduceat(weights, np.arange(0, len(weights), width), dtype=np.float64)
        at = _pass(ranges, number(level)) * width
        start, level, weights = start + at, level + 1, weights[at : at + width]
    chosen = start + _pass(weights, number(level))
    return chosen if ids is None else int(ids[chosen])


def _pass(weights: np.ndarray, u: float) -> int:
    """Where the cumulative weight passes `u` of the total."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    last = int(np.flatnonzero(weights)[-1])  # rounding must not push the draw onto an excluded id
    return min(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")), last)


def token_logprob(row: np.ndarray, token: int, top: int) -> TokenLogprob:
    """Log-softmax of the raw logits at `token` and at the `top` most likely ids (descending, low ids first on ties)."""
    peak = row.max()
    log_total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    best: list[tuple[int, float]] = []
    if top:
        at = max(len(row) - top, 0)
        ids = np.flatnonzero(row >= np.partition(row, at)[at])
        ids = ids[np.argsort(-row[ids], kind="stable")][:top]
        best = [(i, float(row[i]) - log_total) for i in ids.tolist()]
    return TokenLogprob(token_id=token, logprob=float(row[token]) - log_total, top=best)
