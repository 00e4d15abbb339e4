"""How long a request may go without a token or without anybody who could serve it, by a clock that the tests move."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.trace import INVALID_SPAN

from services.gateway.dispatch import Dispatcher
from services.gateway.live import Live
from services.gateway.metrics import Metrics
from services.gateway.output import Output
from services.gateway.request import Request, State
from services.gateway.text import TextStream
from services.gateway.watch import Watch
from shared.errors import Busy, KvrelayError, Unavailable
from shared.messages import Accepted, Generate, Heartbeat, Message, TokenBatch, TokenItem
from tests.support.manual_clock import ManualClock, settle

pytestmark = pytest.mark.asyncio
PATIENCE_S = 8


class Letters:
    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def finish(self) -> str:
        return ""


class Workers:
    """A pipeline of one instance per actor, as the gateway sees it: heartbeats, and answers to its orders."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = Watch()
        self.alive = {"block_manager", "prefill", "decode"}
        self.details: dict[str, dict[str, int]] = {}  # of heartbeats, by actor
        self.refusal: KvrelayError | None = None
        metrics = Metrics(self.watch)
        self.dispatcher = Dispatcher(
            self, self.watch, metrics, self.clock, "g", queue_size=9, max_retries=8, patience_s=PATIENCE_S
        )

    async def request(
        self, subject: str, message: Message, reply_type: type[Accepted], *, timeout_s: float
    ) -> Accepted:
        if self.refusal is not None:
            raise self.refusal
        return Accepted(worker="prefill-1")

    async def publish(self, subject: str, message: Message) -> None:
        """Recalls are for workers; these have nothing to stop."""

    def submit(self) -> Live:
        now = self.clock.monotonic()
        request = Request(
            id="r", work_id="r", generate=Generate(prompt="x", stream=True), prompt=[1], max_tokens=99,
            eos_token_ids=[], arrival_s=now, started=now, progress_at=now,
        )  # fmt: skip
        live = Live(request, TextStream(Letters(), []), Output(True), INVALID_SPAN, contextvars.Context(), frozenset())
        self.dispatcher.submit(live)
        return live

    def token(self, live: Live, worker: str) -> None:
        index = len(live.request.emitted)
        item = TokenItem(request_id="r", attempt=live.request.attempt, index=index, tokens=[97])
        self.dispatcher.tokens(TokenBatch(worker=worker, items=[item]))

    async def wait(self, seconds: int) -> None:
        """Time passes as it does for a gateway: heartbeats, sweeps and placing, once a second."""
        for _ in range(seconds):
            await self.clock.advance(1)
            now = self.clock.monotonic()
            for kind in self.alive:
                details = self.details.get(kind, {})
                actor = kind.rstrip("2")
                beat = Heartbeat(actor=actor, instance=f"{kind}-1", pid=1, ready=True, details=details)
                self.watch.beat(beat, now)
            for instance, silent_s in self.watch.sweep(now):
                self.dispatcher.died(instance, silent_s)
            self.dispatcher.sweep()
            self.dispatcher.placement.wake()
            await settle()


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    there = Workers()
    await there.wait(1)
    placing = asyncio.ensure_future(there.dispatcher.placement.run())
    yield there
    placing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await placing


async def running(workers: Workers) -> Live:
    live = workers.submit()
    await settle()
    assert live.request.state is State.RUNNING
    return live


async def decoding(workers: Workers) -> Live:
    """A request whose decode worker has spoken once."""
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.token(live, "decode-1")
    workers.details = {"prefill": {"running": 0, "waiting": 0}, "decode": {"running": 1, "waiting": 0, "steps": 1}}
    return live


async def error_of(live: Live) -> KvrelayError:
    with pytest.raises(KvrelayError) as ended:
        async with asyncio.timeout(5):
            while await live.output.next() is not None:
                pass
    return ended.value


async def test_a_stream_that_stands_still_without_a_block_manager_ends_within_10_s(workers: Workers) -> None:
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.token(live, "decode-1")
    workers.alive.remove("block_manager")
    await workers.wait(2)
    workers.token(live, "decode-1")  # the page it had
    await workers.wait(PATIENCE_S)
    assert live.request.state is State.RUNNING and live.request.attempt == 0  # it may come back
    await workers.wait(1)
    error = await error_of(live)
    assert isinstance(error, Unavailable) and error.text == "no block_manager is ready"


async def test_a_stream_goes_on_where_it_was_when_the_block_manager_comes_back(workers: Workers) -> None:
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.token(live, "decode-1")
    workers.alive.remove("block_manager")
    await workers.wait(6)
    workers.alive.add("block_manager")
    await workers.wait(3)
    workers.token(live, "decode-1")
    assert (live.request.attempt, len(live.request.emitted)) == (0, 3)


async def test_a_long_prompt_does_not_pay_for_an_actor_that_was_away_for_a_moment(workers: Workers) -> None:
    live = await running(workers)
    await workers.wait(60)
    workers.alive.remove("decode")
    await workers.wait(6)
    assert workers.watch.missing(("decode",)) == ["decode"]
    workers.alive.add("decode")
    await workers.wait(20)
    assert live.request.state is State.RUNNING


@pytest.mark.parametrize("away", ["silent", "refusing"])
async def test_waiting_its_turn_is_no_trouble_after_an_outage(workers: Workers, away: str) -> None:
    """As long as the pool is full, and however long that is, the queue waits."""
    if away == "silent":
        workers.alive.remove("prefill")
        await workers.wait(4)
    workers.refusal = Unavailable("nobody serves prefill.run now")
    live = workers.submit()
    await workers.wait(3)
    workers.alive.add("prefill")
    workers.refusal = Busy("full")
    await workers.wait(30)
    assert live.request.state is not State.DONE and live.request.owner is None
    workers.refusal = None
    await workers.wait(1)
    assert live.request.state is State.RUNNING


async def test_a_stream_that_lost_its_worker_waits_in_the_queue_no_longer_than_promised(workers: Workers) -> None:
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.refusal = Busy("full")
    workers.dispatcher.died("decode-1")  # its successor is there at once, but the pool is full
    await workers.wait(PATIENCE_S - 1)
    assert live.request.state is not State.DONE
    await workers.wait(2)
    assert isinstance(await error_of(live), Unavailable)


async def test_a_step_takes_as_long_as_it_takes(workers: Workers) -> None:
    live = await decoding(workers)
    await workers.wait(100)
    assert (live.request.state, live.request.attempt) == (State.RUNNING, 0)
    workers.token(live, "decode-1")
    workers.details["decode"]["steps"] = 2
    await workers.wait(100)
    workers.token(live, "decode-1")
    workers.details["decode"]["steps"] = 3
    await workers.wait(100)
    assert (live.request.attempt, len(live.request.emitted)) == (0, 4)


async def test_so_does_the_first_step_of_a_sequence(workers: Workers) -> None:
    """It joined while its neighbour's step was under way, so two end before its own does: 8 s each."""
    live = await running(workers)
    workers.details = {"prefill": {"running": 1, "waiting": 0}, "decode": {"running": 1, "waiting": 0, "steps": 7}}
    await workers.wait(2)
    workers.token(live, "prefill-1")
    workers.details["decode"]["steps"] = 8  # had ended before
    await workers.wait(8)
    workers.details["decode"]["steps"] = 9
    await workers.wait(8)
    assert (live.request.state, live.request.attempt) == (State.RUNNING, 0)
    workers.details["decode"]["steps"] = 10
    workers.token(live, "decode-1")
    await workers.wait(1)
    assert (live.request.attempt, len(live.request.emitted)) == (0, 2)


@pytest.mark.parametrize("waiting", [0, 1])
async def test_a_sequence_that_the_others_have_left_behind_starts_again(workers: Workers, waiting: int) -> None:
    """Its last items were lost on the way, or its worker forgot it: 10 s, if others are two steps further."""
    live = await decoding(workers)
    workers.details["decode"]["waiting"] = waiting
    for step in range(2, 12):
        workers.details["decode"]["steps"] = step
        await workers.wait(1)
    assert live.request.attempt == 0
    workers.details["decode"]["steps"] = 12
    await workers.wait(1)
    assert live.request.attempt == 1


async def test_a_worker_whose_sequences_all_stand_still_owes_no_step(workers: Workers) -> None:
    live = await decoding(workers)
    workers.details["decode"] = {"running": 0, "waiting": 2, "steps": 1}
    await workers.wait(10)
    assert live.request.attempt == 0
    await workers.wait(1)
    assert live.request.attempt == 1


@pytest.mark.parametrize("prompts", [0, 5])
async def test_a_hand_over_that_nobody_has_in_hand_starts_again(workers: Workers, prompts: int) -> None:
    """However many other prompts there are."""
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.details = {
        "prefill": {"running": prompts, "waiting": 0},
        "decode": {"running": 0, "waiting": 0, "steps": 0},
    }
    await workers.wait(10)
    assert live.request.attempt == 0
    await workers.wait(1)
    assert live.request.attempt == 1


async def test_a_hand_over_that_prefill_has_in_hand_goes_on(workers: Workers) -> None:
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.details = {"prefill": {"running": 0, "waiting": 1}, "decode": {"running": 0, "waiting": 0, "steps": 0}}
    await workers.wait(100)
    assert (live.request.state, live.request.attempt) == (State.RUNNING, 0)


async def test_one_of_several_decode_workers_may_have_what_was_handed_over(workers: Workers) -> None:
    workers.alive.add("decode2")
    live = await running(workers)
    workers.token(live, "prefill-1")
    workers.details = {"prefill": {"running": 0, "waiting": 0}, "decode": {"running": 1, "waiting": 0, "steps": 1}}
    workers.details["decode2"] = {"running": 0, "waiting": 0, "steps": 4}
    await workers.wait(100)
    assert live.request.attempt == 0
    workers.details["decode"] = {"running": 0, "waiting": 0, "steps": 2}
    await workers.wait(1)
    assert live.request.attempt == 1
