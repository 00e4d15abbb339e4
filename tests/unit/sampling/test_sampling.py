"""The sampler against the obvious definitions, at the edges, and statistically."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels.dispatch import Ops
from shared.messages import Sampling
from shared.models.choice import choose
from shared.sampling import Finish, Sampler, draw, nucleus, seed_of, token_logprob, uniform

OPS = Ops("reference")
VOCAB = 1000
RNG = np.random.default_rng(7)


def sampler(tokens: list[int] | None = None, prompt_tokens: int | None = None, **sampling: Any) -> Sampler:
    tokens = tokens if tokens is not None else [1, 2, 3]
    limits = {key: sampling.pop(key) for key in ("max_tokens", "max_model_len", "request_id") if key in sampling}
    return Sampler(
        Sampling(**sampling),
        request_id=limits.get("request_id", "r"),
        tokens=tokens,
        prompt_tokens=prompt_tokens if prompt_tokens is not None else len(tokens),
        eos_token_ids=[0],
        vocab_size=VOCAB,
        max_tokens=limits.get("max_tokens", 100),
        max_model_len=limits.get("max_model_len", 1000),
    )


def logits(vocab: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    return (RNG.standard_normal(vocab) * scale).astype(np.float32)


def support(row: np.ndarray, draws: int = 400, **sampling: Any) -> set[int]:
    """The distinct tokens of many draws with different seeds."""
    return {sampler(seed=seed, **sampling).choose(row).token for seed in range(draws)}


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[500, 17, 900]] = 3.5
    assert sampler(temperature=0.0).choose(row).token == 17
    assert [
        choice and choice.token for choice in choose(OPS, torch.from_numpy(row[None]), [sampler(temperature=0.0)])
    ] == [17]


def test_uniform_is_a_golden_function_of_seed_and_index() -> None:
    assert uniform(1, 2) == uniform(1, 2) != uniform(1, 3)
    assert uniform(42, 0) == pytest.approx(0.013842768924102522, abs=0)
    values = [uniform(s, i) for s in range(50) for i in range(100)]
    assert min(values) >= 0 and max(values) < 1
    assert np.histogram(values, bins=10, range=(0, 1))[0] == pytest.approx(500, abs=100)


def test_draws_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05] + [1e-30] * 996, np.float32))
    drawn = [sampler(temperature=1.0, seed=seed).choose(row).token for seed in range(4000)]
    assert np.bincount(drawn, minlength=4) / 4000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_result_does_not_depend_on_batch_or_attempt() -> None:
    rows = np.stack([logits() for _ in range(5)])
    seeds = [3, 5, 8, 13, 21]
    together = choose(OPS, torch.from_numpy(rows), [sampler(seed=seed) for seed in seeds])
    alone = [choose(OPS, torch.from_numpy(rows[i : i + 1]), [sampler(seed=seed)])[0] for i, seed in enumerate(seeds)]
    assert together == alone
    first = sampler(seed=9, tokens=[1, 2, 3])
    first.accept(7)
    retried = sampler(seed=9, tokens=[1, 2, 3, 7], prompt_tokens=3)
    assert first.choose(rows[0]) == retried.choose(rows[0])
    assert sampler(request_id="a").choose(rows[0]) == sampler(request_id="a").choose(rows[0])
    assert seed_of("a") != seed_of("b")


def test_top_k_and_top_p_and_min_p_keep_exactly_the_right_ids() -> None:
    row = logits()
    order = np.argsort(-row)
    probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    assert support(row, top_k=3, temperature=5.0) == set(order[:3].tolist())
    assert support(row, top_k=1) == {int(row.argmax())}
    kept = int(np.searchsorted(np.cumsum(probabilities[order]), 0.3)) + 1
    assert support(row, draws=1500, top_p=0.3) <= set(order[:kept].tolist())
    assert set(nucleus(probabilities, 0.3).tolist()) == set(order[:kept].tolist())
    likely = set(np.flatnonzero(probabilities >= 0.5 * probabilities.max()).tolist())
    assert support(row, min_p=0.5) == likely
    # top_p counts what top_k left, not the whole distribution
    flat = np.zeros(VOCAB, np.float32)
    flat[:4] = 1.0
    assert support(flat, top_k=4, top_p=0.5) == {0, 1}


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.999999])
def test_nucleus_equals_the_full_sort(top_p: float) -> None:
    for scale in (0.0, 0.1, 3.0, 40.0):
        row = logits(scale=scale)
        weights = np.exp(row - row.max())
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        kept = min(int(np.searchsorted(cumulative, top_p * weights.sum(dtype=np.float64))) + 1, VOCAB)
        assert nucleus(weights, top_p).tolist() == sorted(order[:kept].tolist())


def constant(u: float) -> Callable[[int], float]:
    return lambda level: u


def test_draw_never_takes_an_id_without_weight() -> None:
    weights = np.zeros(VOCAB, np.float32)
    weights[[3, 700]] = 1.0
    assert {draw(weights, None, constant(u)) for u in (0.0, 0.4999, 0.5, 0.75, 1 - 2**-53)} == {3, 700}
    assert draw(weights, None, constant(0.0)) == 3
    assert draw(weights, np.array([3, 600, 700]), constant(1 - 2**-53)) == 700


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 4096, 4097, 49_152])
def test_a_draw_can_reach_every_id_and_none_is_favoured(vocab: int) -> None:
    weights = np.ones(vocab, np.float32)
    drawn = [draw(weights, None, partial(uniform, 7, n)) for n in range(4000)]
    assert np.mean(drawn) == pytest.approx((vocab - 1) / 2, abs=0.02 * vocab)
    if vocab < 100:
        assert set(drawn) == set(range(vocab))


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """A preempted sequence is computed again in other shapes, which rounds otherwise, and must go on as it was."""
    row = logits(49_152, 2.5)
    row[:30] += 8
    rounded = row + RNG.standard_normal(len(row)).astype(np.float32) * 5e-6
    one, other = (np.exp(values - values.max()) for values in (row, rounded))
    numbers = [partial(uniform, 1, n) for n in range(4000)]
    assert sum(draw(one, None, number) != draw(other, None, number) for number in numbers) <= 4


def test_penalties_follow_vllm() -> None:
    row = np.array([4.0, -4.0, 4.0, 4.0] + [-50.0] * 996, np.float32)
    s = sampler(
        tokens=[0, 1, 2, 2], prompt_tokens=2, temperature=0.0,
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
    )  # fmt: skip
    assert s._processed(row)[:4].tolist() == [2.0, -8.0, 2.0 - 0.5 - 0.5, 4.0]  # prompt: repetition only
    s.accept(3)
    assert s._processed(row)[:4].tolist() == [2.0, -8.0, 1.0, 2.0 - 0.25 - 0.5]
    assert row[:4].tolist() == [4.0, -4.0, 4.0, 4.0]
    for token in range(100, 400):  # the id arrays grow
        s.accept(token)
    assert s._processed(row)[399] == -100.0 - 0.75


def test_logit_bias_and_ids_out_of_the_vocabulary() -> None:
    row = logits()
    biased = sampler(temperature=0.0, logit_bias={5: 100.0, 10**9: 100.0, -1: 100.0}, stop_token_ids=[10**9])
    assert biased.choose(row).token == 5
    assert biased.accept(5) is None


def test_min_tokens_masks_and_stops() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[0], row[9], row[4] = 9.0, 8.0, 7.0
    s = sampler(temperature=0.0, min_tokens=2, stop_token_ids=[9])
    assert not s.plain
    assert [s.choose(row).token, s.accept(4)] == [4, None]
    assert s.choose(row).token == 4
    assert s.accept(4) is None and s.plain
    assert s.choose(row).token == 0
    assert s.accept(0) == Finish("stop")
    ignoring = sampler(temperature=0.0, ignore_eos=True, min_tokens=1, stop_token_ids=[9])
    assert ignoring.choose(row).token == 0 and ignoring.accept(0) is None
    assert ignoring.accept(9) == Finish("stop", 9)


def test_length_limits() -> None:
    assert sampler(max_tokens=1).accept(5) == Finish("length")
    assert sampler(tokens=[1] * 9, max_model_len=10).accept(5) == Finish("length")
    assert sampler(max_tokens=1).accept(0) == Finish("stop")  # eos at the limit is still an eos
    assert sampler(tokens=[1] * 9, max_model_len=12, max_tokens=2).remaining == 2
    resumed = sampler(tokens=[1, 2, 3], prompt_tokens=1, max_tokens=3)
    assert resumed.remaining == 1 and resumed.accept(5) == Finish("length")


def test_logprobs_are_of_the_raw_logits() -> None:
    row = logits()
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    choice = sampler(temperature=0.3, seed=1, logprobs=3, logit_bias={7: 50.0}, repetition_penalty=1.5).choose(row)
    assert choice.logprob is not None and choice.token == choice.logprob.token_id == 7
    assert choice.logprob.logprob == pytest.approx(expected[7], abs=1e-5)
    order = np.argsort(-row, kind="stable")[:3]
    assert [i for i, _ in choice.logprob.top] == order.tolist()
    assert [v for _, v in choice.logprob.top] == pytest.approx(expected[order].tolist(), abs=1e-5)
    assert token_logprob(row, 3, 0).top == []
    ties = token_logprob(np.zeros(VOCAB, np.float32), 3, 5)
    assert [i for i, _ in ties.top] == [0, 1, 2, 3, 4]


def test_rows_that_are_not_numbers_do_not_hurt_their_neighbours() -> None:
    rows = np.stack([logits(), logits(), logits()])
    rows[1, 44] = np.nan
    choices = choose(OPS, torch.from_numpy(rows), [sampler(temperature=0.0), sampler(temperature=0.0), sampler(seed=1)])
    assert choices[1] is None and choices[0] is not None and choices[2] is not None


def test_extreme_temperatures_are_finite() -> None:
    row = logits(scale=30)
    assert support(row, temperature=2e-5) == {int(row.argmax())}
    assert len(support(row, temperature=100.0)) > 100
