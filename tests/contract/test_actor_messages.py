"""What every actor does with a message: one answer, typed errors with safe texts, bounded work, deadlines."""

from __future__ import annotations

import asyncio
import json
import time

import msgpack
import pytest

from shared import errors
from shared.actor import Actor, Call, handles, listens
from shared.messages import Empty, Message, PoolFreed
from tests.conftest import Connect
from tests.support.actors import Ask, running
from tests.support.waiting import until


class Wrong(Message):
    """What a peer of another version might send as an Ask."""

    text: int


class Probe(Actor):
    """Shows each kind of handler."""

    name = "probe"

    async def setup(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.heard: list[int] = []
        self.cancelled: list[str] = []

    @handles("echo", Ask)
    async def echo(self, message: Ask, call: Call) -> Ask:
        return message

    @handles("echo_now", Ask)
    def echo_now(self, message: Ask, call: Call) -> Ask:
        return message

    @handles("nothing", Ask)
    async def nothing(self, message: Ask, call: Call) -> None:
        self.heard.append(message.count)

    @handles("mine", Ask, to="instance")
    async def mine(self, message: Ask, call: Call) -> Ask:
        return Ask(text=self.instance)

    @handles("note", Ask, to="all")
    def note(self, message: Ask, call: Call) -> None:
        self.heard.append(message.count)

    @handles("slow", Ask)
    async def slow(self, message: Ask, call: Call) -> Ask:
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(message.text)
            raise
        return Ask(text="done", count=0 if call.budget_s is None else 1)

    @handles("fails", Ask)
    async def fails(self, message: Ask, call: Call) -> Ask:
        raise RuntimeError(f"secret {message.text}")

    @handles("fails_now", Ask)
    def fails_now(self, message: Ask, call: Call) -> Ask:
        raise RuntimeError(f"secret {message.text}")

    @handles("refuses", Ask)
    async def refuses(self, message: Ask, call: Call) -> Ask:
        raise errors.Busy("the pool is full", retry_after_s=0.25)

    @handles("own_timeout", Ask)
    async def own_timeout(self, message: Ask, call: Call) -> Ask:
        raise TimeoutError("some library's")

    @listens("event.pool.freed", PoolFreed)
    def freed(self, message: PoolFreed, call: Call) -> None:
        self.heard.append(message.free)


@pytest.mark.parametrize("verb", ["echo", "echo_now"])
async def test_a_message_gets_its_answer(connect: Connect, verb: str) -> None:
    client = await connect()
    async with running(Probe, await connect()):
        assert await client.request(f"probe.{verb}", Ask(text="你好", count=7), Ask, timeout_s=2) == Ask(
            text="你好", count=7
        )


async def test_the_answer_is_written_as_the_question_was(connect: Connect, namespace: str) -> None:
    client = await connect()
    async with running(Probe, await connect()):
        nc = client.connection.client
        answer = await nc.request(f"{namespace}.probe.echo", b'{"text": "hi"}', timeout=2)
        assert json.loads(answer.data) == {"text": "hi", "count": 1}
        answer = await nc.request(f"{namespace}.probe.echo", msgpack.packb({"text": "hi"}), timeout=2)
        assert msgpack.unpackb(answer.data) == {"text": "hi", "count": 1}
        assert not answer.headers, "an answer must not repeat the headers of the question"


async def test_a_handler_that_returns_nothing_is_still_answered(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect()) as probe:
        await client.request("probe.nothing", Ask(count=3), Empty, timeout_s=2)
        assert probe.heard == [3]


async def test_an_instance_is_addressed_and_all_are_told(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect()) as one, running(Probe, await connect()) as two:
        for probe in (one, two):
            answer = await client.request(f"probe.mine.{probe.instance}", Ask(), Ask, timeout_s=2)
            assert answer.text == probe.instance
        for number in range(200):
            await client.publish("probe.note", Ask(count=number))
        await client.publish("event.pool.freed", PoolFreed(pool="cpu0", free=999))
        await until(lambda: 999 in one.heard and 999 in two.heard)
        assert one.heard == two.heard == [*range(200), 999], "plain functions hear in order of arrival"


async def test_only_one_instance_of_a_queue_gets_a_message(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect()) as one, running(Probe, await connect()) as two:
        for number in range(40):
            await client.request("probe.nothing", Ask(count=number), Empty, timeout_s=2)
        assert sorted(one.heard + two.heard) == list(range(40))


@pytest.mark.parametrize("verb", ["fails", "fails_now"])
async def test_a_fault_is_answered_at_once_and_tells_nothing(connect: Connect, verb: str) -> None:
    client = await connect()
    async with running(Probe, await connect()) as probe:
        with pytest.raises(errors.Internal) as caught:
            await client.request(f"probe.{verb}", Ask(text="hunter2"), Ask, timeout_s=2)
        assert "hunter2" not in str(caught.value) and "RuntimeError" not in str(caught.value)
        assert probe.instance in str(caught.value)
        assert (await client.request("probe.echo", Ask(text="alive"), Ask, timeout_s=2)).text == "alive"


async def test_a_refusal_keeps_its_type_text_and_hint(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect()):
        with pytest.raises(errors.Busy, match="the pool is full") as caught:
            await client.request("probe.refuses", Ask(), Ask, timeout_s=2)
        assert caught.value.retry_after_s == 0.25


async def test_nobody_there_is_said_at_once(connect: Connect) -> None:
    client = await connect()
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"nobody serves probe\.echo"):
        await client.request("probe.echo", Ask(), Ask, timeout_s=30)
    assert time.monotonic() - began < 1


async def test_ill_typed_and_malformed_bodies_are_refused_counted_and_do_no_harm(
    connect: Connect, namespace: str
) -> None:
    client = await connect()
    nc = client.connection.client
    bad = [
        msgpack.packb({"text": 5}),
        b'{"text": 5}',
        b"{",
        b"\xc1",
        b"\x81\xa4text" + b"\x91" * 500_000,
        b"\x81\xa4text\xdd\x00\x01\xff\xff" + b"\x80" * 131_071,
        b"\x82" + 2 * (b"\xa4text\xa1x"),
    ]
    async with running(Probe, await connect()) as probe:
        for body in bad:
            delays = []
            for _ in range(5):  # the best of five: the machine may be busy with something else
                refused = asyncio.create_task(nc.request(f"{namespace}.probe.echo", body, timeout=5))
                await asyncio.sleep(0)
                began = time.monotonic()
                await nc.request(f"$SRV.PING.probe.{probe.instance}", b"", timeout=5)
                delays.append(time.monotonic() - began)
                assert (await refused).headers["Nats-Service-Error-Code"] == "400"
            assert min(delays) < 0.1
        with pytest.raises(errors.BadRequest, match=r"^text: "):
            await client.request("probe.echo", Wrong(text=5), Ask, timeout_s=2)
        stats = json.loads((await nc.request(f"$SRV.STATS.probe.{probe.instance}", b"", timeout=5)).data)
        echo = next(endpoint for endpoint in stats["endpoints"] if endpoint["name"] == "echo")
        assert echo["num_errors"] == echo["num_requests"] == 5 * len(bad) + 1
        assert echo["last_error"] == "BadRequest"


async def test_a_message_that_cannot_be_sent_is_refused_before(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect()):
        with pytest.raises(errors.TooLarge):
            await client.request("probe.echo", Ask(text="x" * 1_048_576), Ask, timeout_s=2)
        with pytest.raises(errors.BadRequest):
            await client.request("probe.bad subject", Ask(), Ask, timeout_s=2)


async def test_more_than_the_mailbox_holds_is_answered_busy_at_once(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect(), max_inflight=10) as probe:
        waiting = [asyncio.create_task(client.request("probe.slow", Ask(), Ask, timeout_s=10)) for _ in range(30)]
        await until(lambda: sum(task.done() for task in waiting) == 20, 2)
        busy = [task for task in waiting if task.done()]
        for task in busy:
            error = task.exception()
            assert isinstance(error, errors.Busy) and error.retry_after_s
        # a stuck verb holds up neither discovery nor plain functions
        assert (await client.request("probe.echo_now", Ask(text="alive"), Ask, timeout_s=1)).text == "alive"
        probe.release.set()
        done = await asyncio.gather(*(task for task in waiting if task not in busy))
        assert [answer.text for answer in done] == ["done"] * 10


async def test_a_full_mailbox_of_one_verb_leaves_the_others_open(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect(), max_inflight=2) as probe:
        waiting = [asyncio.create_task(client.request("probe.slow", Ask(), Ask, timeout_s=10)) for _ in range(2)]
        await until(lambda: len(probe.serving.inflight) == 2)
        assert (await client.request("probe.echo", Ask(text="cancel"), Ask, timeout_s=1)).text == "cancel"
        probe.release.set()
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("reply", ["{namespace}.probe.note", "$SRV.PING", "$JS.API.INFO"])
async def test_a_caller_cannot_have_answers_sent_with_our_rights(connect: Connect, namespace: str, reply: str) -> None:
    client = await connect()
    async with running(Probe, await connect()) as probe:
        nc = client.connection.client
        for verb in ("echo", "echo_now"):
            await nc.publish(f"{namespace}.probe.{verb}", b'{"count": 5}', reply=reply.format(namespace=namespace))
        await client.request("probe.nothing", Ask(count=9), Empty, timeout_s=2)
        await client.request("probe.nothing", Ask(count=9), Empty, timeout_s=2)
        assert probe.heard == [9, 9]


async def test_the_callers_deadline_ends_the_work_and_says_so(connect: Connect, namespace: str) -> None:
    client = await connect()
    async with running(Probe, await connect()) as probe:
        nc = client.connection.client
        body = msgpack.packb({"text": "late"})
        answer = await nc.request(f"{namespace}.probe.slow", body, timeout=5, headers={"kvrelay-timeout-ms": "80"})
        assert answer.headers["Nats-Service-Error-Code"] == "504"
        assert probe.cancelled == ["late"]
        with pytest.raises(errors.Timeout):
            await client.request("probe.slow", Ask(text="later"), Ask, timeout_s=0.08)
        await until(lambda: probe.cancelled == ["late", "later"])


async def test_a_librarys_own_timeout_is_not_the_callers(connect: Connect) -> None:
    client = await connect()
    async with running(Probe, await connect()):
        with pytest.raises(errors.Internal):
            await client.request("probe.own_timeout", Ask(), Ask, timeout_s=5)
