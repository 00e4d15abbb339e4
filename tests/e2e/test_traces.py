"""The pipeline as one trace per request: exported by real processes to a real collector."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.pipeline import Pipeline, collect, comes_true, pipeline
from tests.support.otlp import OtlpReceiver, ReceivedSpan, orphans

MAX_NAMES = 40
LONG = {"max_tokens": 100, "sampling": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def running(collector: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    state: Path = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVRELAY_OTLP_ENDPOINT", collector.endpoint)
        # two pools, so that hand-overs are transfers; 18 pages each, so that the requests below preempt one another
        options = ("--prefill-pool", "cpu0", "--decode-pool", "cpu1", "--num-blocks-override", "18")
        with pipeline(state, *options) as started:
            yield started


def of(spans: list[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == trace_id]


async def test_each_request_is_one_whole_trace_over_all_its_actors(running: Pipeline, collector: OtlpReceiver) -> None:
    async with running.nats() as client:
        answers = await asyncio.gather(
            *(collect(client, {"prompt": f"Tell me about the number {n}", **LONG}) for n in range(6))
        )
    assert max(answer["attempts"] for answer in answers) > 1
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as web:
        whole = await web.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
    assert whole.status_code == 200
    traces = {answer["trace_id"] for answer in answers}
    assert len(traces) == 6

    def complete(spans: list[ReceivedSpan]) -> bool:
        ended = [span for span in spans if span.name == "decode.sequence"]
        return len(ended) >= 7 and len({span.trace_id for span in spans if not span.parent_id}) >= 7

    await asyncio.to_thread(collector.wait, complete)
    await asyncio.sleep(2.5)  # exporters send once a second: what should not be there has come after two of them
    await asyncio.to_thread(comes_true, lambda: each_is_whole(collector.spans, traces), 15)


def each_is_whole(spans: list[ReceivedSpan], traces: set[str]) -> None:
    """Asserts it of every trace in `traces`, and what holds of all spans together."""
    assert not orphans(spans), {span.name for span in orphans(spans)}
    for trace_id in traces:
        found = of(spans, trace_id)
        assert {"gateway", "prefill", "decode", "block_manager", "offload"} == {span.service for span in found}
        assert len([span for span in found if not span.parent_id]) == 1
        assert [span.service for span in found if "gen_ai.usage.output_tokens" in span.attributes] == ["gateway"]
        root = next(span for span in found if not span.parent_id)
        assert all(root.start_ns <= span.start_ns <= span.end_ns for span in found)
    assert len({span.name for span in spans}) < MAX_NAMES
    assert max(len(span.events) for span in spans) <= 64, "128 are kept, the rest would vanish"


async def test_a_cancelled_request_ends_all_its_spans(running: Pipeline, collector: OtlpReceiver) -> None:
    before = {span.trace_id for span in collector.spans}
    async with running.nats() as client:
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        body = b'{"prompt": "Count to a million", "max_tokens": 200, "stream": true, "sampling": {"ignore_eos": true}}'
        await client.publish("kvrelay.gateway.generate", body, reply=inbox)
        for _ in range(5):
            await subscription.next_msg(30)
        await subscription.unsubscribe()

    def ended(spans: list[ReceivedSpan]) -> bool:
        new = [span for span in spans if span.trace_id not in before]
        whole = any(not span.parent_id for span in new) and any(span.name == "decode.sequence" for span in new)
        return whole and not orphans(new)  # each process sends its part in its own time

    spans = await asyncio.to_thread(collector.wait, ended)
    new = [span for span in spans if span.trace_id not in before]
    root = next(span for span in new if not span.parent_id)
    assert root.failed and root.attributes["error.type"] == "Cancelled"
    assert not orphans(new)
