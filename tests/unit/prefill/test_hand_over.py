"""The queue in front of decode: most important first, patience with limits, and no second try of an unclear one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.prefill import hand_over
from services.prefill.hand_over import HandOver
from shared import errors
from shared.actor import Actor, Call, handles
from shared.clock import SYSTEM
from shared.handles import BlockTable, TailHandle, pack_u32
from shared.messages import Accepted, Sampling, StartDecode, Work
from shared.token_items import Preempted
from tests.conftest import Connect
from tests.support.actors import running
from tests.support.waiting import until


class Decode(Actor):
    """A decode worker that answers what the test says."""

    name = "decode"

    async def setup(self) -> None:
        self.answers: list[errors.KvrelayError | None] = []
        self.default: errors.KvrelayError | None = None
        self.started: list[str] = []
        self.tries = 0

    @handles("start", StartDecode)
    async def begin(self, message: StartDecode, call: Call) -> Accepted:
        self.tries += 1
        error = self.answers.pop(0) if self.answers else self.default
        if error is not None:
            raise error
        self.started.append(message.work.request_id)
        return Accepted(worker=self.instance)


def start(name: str, arrival_s: float = 0.0, priority: int = 0) -> StartDecode:
    work = Work(
        request_id=name,
        gateway="g",
        tokens=pack_u32([1, 2]),
        prompt_tokens=1,
        max_tokens=9,
        sampling=Sampling(),
        eos_token_ids=[],
        priority=priority,
        arrival_s=arrival_s,
    )
    tail = TailHandle(slot=0, generation=0, tokens=1)
    return StartDecode(work=work, lease=1, table=BlockTable(pool="p", epoch=1), tail=tail, cached_tokens=0)


@pytest.fixture
async def give(connect: Connect) -> HandOver:
    return HandOver(await connect(), SYSTEM)


@pytest.fixture
async def decode(connect: Connect, namespace: str) -> AsyncIterator[Decode]:
    async with running(Decode, await connect(), namespace=namespace) as started:
        yield started


async def test_busy_is_tried_again(give: HandOver, decode: Decode) -> None:
    decode.answers = [errors.Busy("full"), errors.Busy("full"), errors.Unavailable("stopping"), None]
    assert await give(start("a"), lambda: None) == decode.instance
    assert decode.tries == 4 and len(give) == 0


async def test_the_most_important_goes_first(give: HandOver, decode: Decode) -> None:
    decode.default = errors.Busy("full")
    waiting = [
        asyncio.create_task(give(start(name, arrival, priority), lambda: None))
        for name, arrival, priority in (("late", 3, 0), ("early", 1, 0), ("urgent", 4, -1), ("later", 5, 0))
    ]
    # three were the most important one for a moment and have tried; from then on only the urgent one does
    await until(lambda: len(give) == 4 and decode.tries >= 5)
    assert not decode.started
    decode.default = None
    await asyncio.gather(*waiting)
    assert decode.started == ["urgent", "early", "late", "later"]


async def test_limits(give: HandOver, monkeypatch: pytest.MonkeyPatch, connect: Connect, namespace: str) -> None:
    monkeypatch.setattr(hand_over, "BUSY_LIMIT_S", 0.2)
    monkeypatch.setattr(hand_over, "ABSENT_LIMIT_S", 0.1)
    with pytest.raises(errors.Unavailable, match="decode"):
        await give(start("a"), lambda: None)
    async with running(Decode, await connect(), namespace=namespace) as decode:
        decode.default = errors.Busy("full")
        with pytest.raises(Preempted):
            await give(start("a"), lambda: None)


@pytest.mark.parametrize("answer", [errors.Timeout("late"), errors.Conflict("taken")])
async def test_an_unclear_hand_over_is_not_repeated(
    give: HandOver, decode: Decode, answer: errors.KvrelayError
) -> None:
    decode.default = answer
    with pytest.raises(errors.Unavailable, match="not known"):
        await give(start("a"), lambda: None)
    assert decode.tries == 1


async def test_stale_and_stops_end_it_at_once(give: HandOver, decode: Decode) -> None:
    decode.default = errors.Stale("gone")
    with pytest.raises(errors.Stale):
        await give(start("a"), lambda: None)
    with pytest.raises(errors.Cancelled):
        await give(start("a"), lambda: errors.Cancelled("enough"))
    assert decode.tries == 1 and len(give) == 0
