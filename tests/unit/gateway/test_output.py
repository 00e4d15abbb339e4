from __future__ import annotations

import asyncio

import pytest

from services.gateway.output import Output
from shared.errors import Timeout
from shared.messages import TokenLogprob


async def test_deltas_are_merged_while_the_client_is_slow() -> None:
    output = Output(streaming=True)
    output.push("a", [1], [TokenLogprob(token_id=1, logprob=-1.0)])
    output.push("", [2], [TokenLogprob(token_id=2, logprob=-2.0)])
    delta = await output.next()
    assert delta is not None and (delta.text, delta.token_ids) == ("a", [1, 2])
    assert [item.token_id for item in delta.logprobs or []] == [1, 2]
    waiting = asyncio.ensure_future(output.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    output.push("b", [3], None)
    assert (await waiting) is not None
    output.end()
    output.push("late", [4], None)
    assert await output.next() is None
    assert await output.next() is None


async def test_a_stream_gives_what_it_has_before_its_error() -> None:
    output = Output(streaming=True)
    output.push("a", [1], None)
    output.end(Timeout("late"))
    output.end()  # the first end counts
    assert await output.next() is not None
    with pytest.raises(Timeout):
        await output.next()


async def test_one_answer_is_whole_or_an_error() -> None:
    whole, failed = Output(streaming=False), Output(streaming=False)
    waiting = asyncio.ensure_future(whole.next())
    whole.push("a", [1], None)
    await asyncio.sleep(0)
    assert not waiting.done()
    whole.push("b", [2], None)
    whole.end()
    delta = await waiting
    assert delta is not None and (delta.text, delta.token_ids) == ("ab", [1, 2])
    assert await whole.next() is None
    failed.push("a", [1], None)
    failed.end(Timeout("late"))
    with pytest.raises(Timeout):
        await failed.next()
