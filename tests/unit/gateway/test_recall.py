from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.gateway.recall import Recall, Tasks
from shared.errors import Unavailable
from shared.messages import CancelWork, Message, TokenItem
from tests.support.manual_clock import settle

pytestmark = pytest.mark.asyncio


class Sent:
    """A bus that notes what it was given, and may be down."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Message]] = []
        self.down = False

    async def publish(self, subject: str, message: Message) -> None:
        if self.down:
            raise Unavailable("down")
        self.messages.append((subject, message))


def stray(attempt: int = 0, **fields: Any) -> TokenItem:
    return TokenItem(request_id="r", attempt=attempt, index=0, tokens=[1], **fields)


async def test_what_background_work_raises_is_logged() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    with capture_logs() as lines:
        Tasks().spawn(fails())
        await settle()
    assert [(line["log_level"], type(line["exc_info"])) for line in lines] == [("error", ZeroDivisionError)]


async def test_work_that_is_cancelled_is_not() -> None:
    tasks = Tasks()
    with capture_logs() as lines:
        tasks.spawn(asyncio.Event().wait())  # type: ignore[arg-type]
        for task in list(tasks._running):
            task.cancel()
        await settle()
    assert not lines and not tasks._running


async def test_a_stray_attempt_is_recalled_once_a_second_until_it_ends() -> None:
    bus = Sent()
    recall = Recall(bus, Tasks(), lambda instance: instance.partition("-")[0])
    for now, item in (
        (0.0, stray()),
        (0.9, stray()),
        (0.9, stray(attempt=1)),
        (1.0, stray()),
        (2.5, stray(finish_reason="stop")),
    ):
        recall.stray("decode-1", item, now)
    await settle()
    said = [(subject, message.attempt) for subject, message in bus.messages if isinstance(message, CancelWork)]
    assert said == [("decode.cancel.decode-1", attempt) for attempt in (0, 1, 0)]


async def test_a_recall_that_cannot_be_sent_does_no_harm() -> None:
    bus = Sent()
    bus.down = True
    with capture_logs() as lines:
        Recall(bus, Tasks(), lambda instance: "decode").tell("decode-1", "r", 0)
        await settle()
    assert [line["log_level"] for line in lines] == ["warning"]
