from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.request import Request, State, Verdict
from shared.errors import Unavailable
from shared.handles import unpack_u32
from shared.messages import FinishReason, Generate, TokenItem, TokenLogprob, WireError


def request(max_tokens: int = 10) -> Request:
    return Request(
        id="r", work_id="r", generate=Generate(prompt="x"), prompt=[5, 6, 7], max_tokens=max_tokens, eos_token_ids=[2],
        arrival_s=1000.0, started=0.0,
    )  # fmt: skip


def item(index: int, *tokens: int, attempt: int = 0, finish: FinishReason | None = None, error: str = "") -> TokenItem:
    return TokenItem(
        request_id="r", attempt=attempt, index=index, tokens=list(tokens), finish_reason=finish,
        error=WireError(kind=error, text="why") if error else None, cached_tokens=2, compute_s=0.5,
    )  # fmt: skip


def running() -> Request:
    one = request()
    one.place()
    assert one.accepted("prefill-a", 0, 0.1)
    return one


def test_the_plain_life() -> None:
    one = running()
    assert one.receive("prefill-a", item(0, 11), 0.2).tokens == [11]
    assert one.handing_over
    assert one.receive("decode-b", item(1, 12), 0.3).verdict is Verdict.EMIT
    assert not one.handing_over
    last = one.receive("decode-b", item(2, 13, finish="stop"), 0.5)
    assert (last.verdict, last.tokens) == (Verdict.FINISH, [13])
    assert one.actors == ["prefill-a", "decode-b"]
    assert one.usage().model_dump() == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2}
    timings = one.timings(0.6)
    assert (timings.queued_s, timings.ttft_s, timings.compute_s, timings.total_s) == (0.1, 0.2, 0.5, 0.6)
    assert timings.tokens_per_s == pytest.approx(2 / 0.3)
    one.end()
    assert one.receive("decode-b", item(3, 14), 0.7).verdict is Verdict.IGNORE


def test_tokens_may_overtake_the_acceptance() -> None:
    one = request()
    one.place()
    assert one.receive("prefill-a", item(0, 11), 0.1).verdict is Verdict.EMIT
    assert one.accepted("prefill-a", 0, 0.2)
    assert one.receive("decode-b", item(1, 12), 0.3).verdict is Verdict.EMIT
    assert one.owner == "decode-b"
    assert one.accepted("prefill-a", 0, 0.4)  # even later; the owner stays
    assert one.owner == "decode-b"


def test_repeats_are_cut_and_gaps_are_faults() -> None:
    one = running()
    one.receive("prefill-a", item(0, 11), 0.2)
    assert one.receive("prefill-a", item(0, 11), 0.2).verdict is Verdict.IGNORE
    assert one.receive("decode-b", item(0, 11, 12), 0.3).tokens == [12]
    gap = one.receive("decode-b", item(3, 14), 0.4)
    assert gap.verdict is Verdict.FAULT and "2 to 2" in str(gap.error)
    assert one.emitted == [11, 12]


def test_logprobs_are_cut_with_their_tokens() -> None:
    one = running()
    probs = [TokenLogprob(token_id=t, logprob=-1.0) for t in (11, 12)]
    one.receive("prefill-a", item(0, 11), 0.2)
    got = one.receive("decode-b", item(0, 11, 12).model_copy(update={"logprobs": probs}), 0.3)
    assert [p.token_id for p in got.logprobs or []] == [12]


def test_old_attempts_are_ignored_and_the_next_one_starts_where_the_stream_ended() -> None:
    one = running()
    one.receive("prefill-a", item(0, 11), 0.2)
    one.receive("decode-b", item(1, 12), 0.3)
    assert one.fault(Unavailable("gone"), 0.4, limit=5, patience_s=9)
    one.requeue()
    one.place()
    work = one.work("gateway-g")
    assert unpack_u32(work.tokens).tolist() == [5, 6, 7, 11, 12]
    assert (work.attempt, work.prompt_tokens, work.max_tokens) == (1, 3, 10)
    assert one.receive("decode-b", item(2, 99), 0.5).verdict is Verdict.IGNORE
    assert not one.accepted("prefill-a", 0, 0.5)
    assert one.accepted("prefill-c", 1, 0.6)
    assert one.receive("prefill-c", item(2, 13, attempt=1), 0.7).tokens == [13]
    assert one.emitted == [11, 12, 13]
    assert one.cached_tokens == 2


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("Preempted", Verdict.PREEMPTED), ("Stale", Verdict.FAULT), ("Unavailable", Verdict.FAULT),
     ("Timeout", Verdict.FAULT), ("TooLarge", Verdict.FAIL), ("Internal", Verdict.FAIL)],
)  # fmt: skip
def test_which_errors_start_the_next_attempt(kind: str, verdict: Verdict) -> None:
    one = running()
    got = one.receive("prefill-a", item(0, 11, error=kind), 0.2)
    assert (got.verdict, got.tokens) == (verdict, [11])


def test_a_worker_may_not_cancel_what_nobody_cancelled() -> None:
    one = running()
    one.receive("prefill-a", item(0, 11), 0.2)
    assert one.receive("decode-b", item(1, finish="cancelled"), 0.3).verdict is Verdict.FAULT
    assert one.finish_reason is None


def test_faults_are_bounded_in_number_and_in_time_without_tokens() -> None:
    one = running()
    assert one.fault(Unavailable("1"), 1.0, limit=3, patience_s=9)
    assert not one.fault(Unavailable("2"), 10.5, limit=3, patience_s=9)
    two = running()
    assert two.fault(Unavailable("1"), 1.0, limit=3, patience_s=9)
    two.receive("prefill-a", item(0, 11), 2.0)  # a token: patience starts anew, the count goes on
    assert two.fault(Unavailable("2"), 10.5, limit=3, patience_s=9)
    assert two.fault(Unavailable("3"), 11.0, limit=3, patience_s=9)
    assert not two.fault(Unavailable("4"), 11.0, limit=3, patience_s=9)


def test_whose_death_concerns_it() -> None:
    one = request()
    one.place()
    assert not one.concerns("prefill-a", "prefill")
    one.accepted("prefill-a", 0, 0.1)
    assert one.concerns("prefill-a", "prefill")
    assert not one.concerns("decode-b", "decode")
    one.receive("prefill-a", item(0, 11), 0.2)
    assert one.concerns("decode-b", "decode")  # it may have been handed to this one
    one.receive("decode-b", item(1, 12), 0.3)
    assert one.concerns("decode-b", "decode")
    assert not one.concerns("decode-c", "decode")
    assert not one.concerns("prefill-a", "prefill")
    assert one.owners() == ["prefill-a", "decode-b"]


def test_a_refused_order_keeps_its_attempt_unless_it_may_have_been_started() -> None:
    one = request()
    one.place()
    one.refused(maybe_started=False)
    assert (one.state, one.attempt) == (State.QUEUED, 0)
    one.place()
    one.refused(maybe_started=True)
    assert (one.state, one.attempt) == (State.QUEUED, 1)


def test_never_more_than_max_tokens() -> None:
    one = request(max_tokens=2)
    one.place()
    assert one.receive("prefill-a", item(0, 1, 2, 3, finish="length"), 0.1).tokens == [1, 2]


@given(st.data())
def test_whatever_arrives_the_client_sees_a_prefix_of_the_one_answer(data: st.DataObject) -> None:
    answer = list(range(100, 130))
    one = request(max_tokens=len(answer))
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += 0.1
        before = list(one.emitted)
        if one.state is State.QUEUED:
            one.place()
            continue
        step = data.draw(st.sampled_from(["item", "item", "item", "old", "refused", "death"]))
        if step == "refused" and one.state is State.PLACING:
            one.refused(data.draw(st.booleans()))
        elif step == "death" and one.state is State.RUNNING:
            one.requeue()
        elif step in ("item", "old"):
            attempt = one.attempt - (step == "old" and one.attempt > 0)
            index = data.draw(st.integers(max(0, len(before) - 3), min(len(answer) - 1, len(before) + 2)))
            tokens = answer[index : index + data.draw(st.integers(0, 4))]
            ends = bool(tokens) and index + len(tokens) == len(answer)
            got = one.receive("w", item(index, *tokens, attempt=attempt, finish="length" if ends else None), now)
            assert one.emitted == before + got.tokens
            if attempt < one.attempt:
                assert got.verdict is Verdict.IGNORE
            if got.verdict is Verdict.FINISH:
                assert one.emitted == answer
                return
            if got.verdict is Verdict.FAULT:
                assert index > len(before)
                one.requeue()
        assert one.emitted == answer[: len(one.emitted)]
        assert one.emitted[: len(before)] == before
