"""One request, one trace: over every hop, retry, stream and parallel branch, with nothing orphaned and nothing idle."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
from nats.aio.msg import Msg
from opentelemetry import trace

from shared import errors, telemetry, wire
from shared.actor import Actor, Call, handles
from shared.messages import Heartbeat
from tests.conftest import Connect
from tests.support.actors import Ask, running
from tests.support.otlp import OtlpReceiver, ReceivedSpan, orphans
from tests.support.waiting import until

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture(autouse=True)
def tracing(otlp: OtlpReceiver) -> Iterator[None]:
    telemetry.setup("test", "test-1", otlp.endpoint)
    yield
    telemetry.shutdown()


class Front(Actor):
    """Where requests enter; asks Back in every way there is."""

    name = "front"

    @handles("enter", Ask, root=True)
    async def enter(self, message: Ask, call: Call) -> Ask:
        return Ask(text=await getattr(self, f"_{message.text}")(), count=message.count)

    @handles("items", Ask, root=True)
    async def items(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        async with aclosing(self.bus.stream("back.items", message, Ask)) as items:
            async for item in items:
                yield item
        await self.bus.request("back.leaf", Ask(), Ask, timeout_s=2)

    async def _line(self) -> str:
        return (await self.bus.request("back.middle", Ask(), Ask, timeout_s=2)).text

    async def _parallel(self) -> str:
        tracer = telemetry.tracer()

        async def branch(name: str) -> None:
            with tracer.start_as_current_span(name):
                for _ in range(5):
                    await self.bus.request("back.leaf", Ask(text=name), Ask, timeout_s=5)

        await asyncio.gather(branch("branch-a"), branch("branch-b"), branch("branch-c"))
        return ""

    async def _retry(self) -> str:
        for _ in range(3):
            try:
                await self.bus.request("back.busy", Ask(), Ask, timeout_s=2)
            except errors.Busy:
                await asyncio.sleep(0.01)
        return ""

    async def _watched(self) -> str:
        await self.bus.request("back.leaf", Ask(), Ask, timeout_s=2, watched=True)
        done = asyncio.Event()

        async def later() -> None:
            await self.bus.publish("back.note", Ask())
            done.set()

        self.spawn("later", later())
        await done.wait()
        return ""

    async def _stall(self) -> str:
        await asyncio.Event().wait()
        return ""


class Back(Actor):
    name = "back"

    async def setup(self) -> None:
        self.noted = 0

    @handles("middle", Ask)
    async def middle(self, message: Ask, call: Call) -> Ask:
        await self.bus.request("back.leaf", message, Ask, timeout_s=2)
        await self.bus.request("back.leaf_now", message, Ask, timeout_s=2)
        below = trace.get_current_span(telemetry.request_context()).get_span_context()
        return Ask(text=f"{below.span_id:016x}")

    @handles("leaf", Ask)
    async def leaf(self, message: Ask, call: Call) -> Ask:
        await asyncio.sleep(0.002)
        call.span.set_attribute("from", message.text)
        return message

    @handles("leaf_now", Ask)
    def leaf_now(self, message: Ask, call: Call) -> Ask:
        return message

    @handles("note", Ask)
    def note(self, message: Ask, call: Call) -> None:
        self.noted += 1

    @handles("busy", Ask)
    async def busy(self, message: Ask, call: Call) -> Ask:
        raise errors.Busy("later")

    @handles("items", Ask)
    async def items(self, message: Ask, call: Call) -> AsyncIterator[Ask]:
        for number in range(message.count):
            yield Ask(text=str(number))


def tree(spans: list[ReceivedSpan], root: ReceivedSpan) -> list[object]:
    """Names below `root`, nested; siblings in order of start."""
    children = sorted((span for span in spans if span.parent_id == root.span_id), key=lambda span: span.start_ns)
    return [root.name, *(tree(spans, child) for child in children)]


async def test_a_line_of_hops_is_one_trace(connect: Connect, otlp: OtlpReceiver) -> None:
    client = await connect()
    async with running(Front, await connect()), running(Back, await connect()):
        answer = await client.request(
            "front.enter", Ask(text="line"), Ask, timeout_s=5, headers={"Traceparent": CALLER}
        )
    spans = await asyncio.to_thread(otlp.wait, lambda spans: len(spans) == 4)
    (root,) = [span for span in spans if not span.parent_id]
    assert len({span.trace_id for span in spans}) == 1 and not orphans(spans)
    assert tree(spans, root) == ["front.enter", ["back.middle", ["back.leaf"], ["back.leaf_now"]]]
    assert root.links == ((CALLER[3:35], CALLER[36:52]),), "the caller is linked"
    assert root.trace_id != CALLER[3:35], "and its unsampled flag did not switch ours off"
    assert answer.text == root.span_id, "two hops down the request's root is still known"


async def test_parallel_work_keeps_its_own_parents(connect: Connect, otlp: OtlpReceiver) -> None:
    client = await connect()
    async with running(Front, await connect()), running(Back, await connect()):
        await asyncio.gather(
            *(client.request("front.enter", Ask(text="parallel"), Ask, timeout_s=10) for _ in range(6))
        )
    spans = await asyncio.to_thread(otlp.wait, lambda spans: len(spans) == 6 * (1 + 3 + 15))
    assert not orphans(spans)
    by_id = {span.span_id: span for span in spans}
    for leaf in (span for span in spans if span.name == "back.leaf"):
        parent = by_id[leaf.parent_id]
        assert parent.name == leaf.attributes["from"] and parent.trace_id == leaf.trace_id
    roots = [span for span in spans if not span.parent_id]
    assert len({root.trace_id for root in roots}) == 6
    assert all(len([span for span in spans if span.trace_id == root.trace_id]) == 19 for root in roots)


async def test_retries_streams_watched_and_spawned_work_stay_in_the_trace(connect: Connect, otlp: OtlpReceiver) -> None:
    client = await connect()
    async with running(Front, await connect()), running(Back, await connect()) as back:
        await client.request("front.enter", Ask(text="retry"), Ask, timeout_s=5)
        await client.request("front.enter", Ask(text="watched"), Ask, timeout_s=5)
        assert [item.text async for item in client.stream("front.items", Ask(count=50), Ask)][-1] == "49"
        await until(lambda: back.noted)
    spans = await asyncio.to_thread(otlp.wait, lambda spans: len(spans) == 4 + 3 + 3)
    assert not orphans(spans)
    trees = sorted(tree(spans, root) for root in spans if not root.parent_id)  # type: ignore[type-var]
    assert trees == [
        ["front.enter", ["back.busy"], ["back.busy"], ["back.busy"]],
        ["front.enter", ["back.leaf"], ["back.note"]],
        ["front.items", ["back.items"], ["back.leaf"]],
    ]
    busy = [span for span in spans if span.name == "back.busy"]
    assert all(span.failed and span.attributes["error.type"] == "Busy" for span in busy)


async def test_an_aborted_request_still_ends_its_spans(connect: Connect, otlp: OtlpReceiver) -> None:
    client = await connect()
    async with running(Front, await connect()) as front, running(Back, await connect()):
        with pytest.raises(errors.Timeout):
            await client.request("front.enter", Ask(text="stall"), Ask, timeout_s=0.05)
        gone = asyncio.create_task(client.request("front.enter", Ask(text="stall"), Ask, timeout_s=30, watched=True))
        await until(lambda: front.serving.watched)
        gone.cancel()
        await until(lambda: not front.serving.inflight)
        with pytest.raises(errors.BadRequest):
            await client.request("front.enter", Bad(), Ask, timeout_s=2)
        with pytest.raises(errors.Internal):
            await client.request("front.enter", Ask(text="no_such"), Ask, timeout_s=2)
    spans = await asyncio.to_thread(otlp.wait, lambda spans: len(spans) == 4)
    assert sorted(span.attributes["error.type"] for span in spans) == [
        "AttributeError", "BadRequest", "Cancelled", "Timeout",
    ]  # fmt: skip


class Bad(Ask):
    text: int = 5  # type: ignore[assignment]


async def test_names_do_not_grow_with_requests_and_idle_actors_make_no_traces(
    connect: Connect, otlp: OtlpReceiver
) -> None:
    client, beats = await connect(), Counter[str]()

    async def hear(msg: Msg) -> None:
        beats[wire.decode(msg.data, Heartbeat).actor] += 1

    await client.subscribe("event.actor.heartbeat", hear)
    async with running(Front, await connect()), running(Back, await connect()):
        await until(lambda: beats["front"] >= 2 and beats["back"] >= 2)
        await client.request("back.leaf", Ask(), Ask, timeout_s=2)  # outside of any request
        for _ in range(250):
            await asyncio.gather(
                *(client.request("front.enter", Ask(text="line"), Ask, timeout_s=10) for _ in range(4))
            )
    spans = await asyncio.to_thread(otlp.wait, lambda spans: len(spans) >= 4000, 30)
    assert len(spans) == 4000 and not orphans(spans)
    assert {span.name for span in spans} == {"front.enter", "back.middle", "back.leaf", "back.leaf_now"}


async def test_the_last_spans_are_sent_at_shutdown(connect: Connect, otlp: OtlpReceiver) -> None:
    client = await connect()
    async with running(Front, await connect()), running(Back, await connect()):
        await client.request("front.enter", Ask(text="line"), Ask, timeout_s=5)
    assert await asyncio.to_thread(telemetry.shutdown)
    assert len(otlp.spans) == 4


async def test_sampling_is_decided_once_for_a_whole_request(connect: Connect, otlp: OtlpReceiver) -> None:
    telemetry.setup("test", "test-1", otlp.endpoint, 0.3)
    client = await connect()
    async with running(Front, await connect()), running(Back, await connect()):
        for _ in range(60):
            await client.request("front.enter", Ask(text="line"), Ask, timeout_s=5)
    await asyncio.to_thread(telemetry.shutdown)
    traces = {span.trace_id for span in otlp.spans}
    assert 3 < len(traces) < 40
    assert len(otlp.spans) == 4 * len(traces) and not orphans(otlp.spans)
