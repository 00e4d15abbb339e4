"""Cancels, repeats, lost leases, restarts and failures of prefill and decode; the test stands in for the gateway."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from services.block_manager.actor import BlockManager
from services.decode import actor as decode_actor
from services.prefill import hand_over
from services.prefill.actor import PrefillActor
from shared import errors
from shared.messages import Accepted, Empty, Release, StartDecode
from shared.wire import decode as decode_body
from tests.support.brake import Brake
from tests.support.engines import BLOCK, OPTIONS, Engines, engines, prompt, with_options
from tests.support.waiting import until


async def test_cancel_in_every_state(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, workers = running.gateway, (running.prefill, running.decode)
    expected = await gateway.complete(gateway.work(prompt(300), 40, cache_salt="whole"))
    for tokens in (0, 1, 2, 9):
        with monkeypatch.context() as held:
            brake = Brake(held, running.decode.engine._model, passes=max(0, tokens - 1))
            attempt = await gateway.send(gateway.work(prompt(300), 40, cache_salt="cut"))
            await gateway.until(attempt, tokens)
            await gateway.cancel(attempt, *workers)
            brake.release()
            await gateway.finish(attempt, 10)
        assert attempt.last.finish_reason == "cancelled"
        await running.until_free()
        await gateway.cancel(attempt, *workers)  # twice, and of something finished
    unknown = gateway.work(prompt(3), 3)
    gateway.attempts["unknown", 0] = type(attempt)(unknown)
    await gateway.cancel(gateway.attempts["unknown", 0], *workers)
    retried = await gateway.finish(await gateway.send(gateway.work(prompt(300), 40, cache_salt="cut")))
    assert retried.tokens == expected and retried.items[0].cached_tokens in range(0, 300, BLOCK)


async def test_a_worker_with_other_settings_is_refused_at_its_start(running: Engines, model: str) -> None:
    for wrong in ({"block_size": 32}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}):
        with pytest.raises(errors.Misconfigured, match="cpu0"):
            await running.start(PrefillActor, **wrong)


async def test_repeated_messages_start_once(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, bus = running.gateway, running.gateway.bus
    starts: list[StartDecode] = []

    async def overhear(msg: Any) -> None:
        starts.append(decode_body(msg.data, StartDecode))

    await bus.subscribe("decode.start", overhear)
    work = gateway.work(prompt(100), 30)
    attempt, _, _ = await asyncio.gather(gateway.send(work), gateway.send(work), gateway.send(work))
    await gateway.until(attempt, 3)
    replies = [await bus.request("decode.start", starts[0], Accepted, timeout_s=2) for _ in range(2)]
    assert {reply.worker for reply in replies} == {running.decode.instance}
    await gateway.finish(attempt)
    await bus.request("decode.start", starts[0], Accepted, timeout_s=2)
    await gateway.send(work)  # long done, still not started again
    await running.until_free()
    assert len(attempt.tokens) == 30 and len(starts) == 4


@with_options(decode={"max_num_seqs": 1})
async def test_decode_says_busy_and_prefill_waits_in_order(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "BUSY_LIMIT_S", 60.0)  # the order is the matter here, on however slow a machine
    brake = Brake(monkeypatch, running.decode.engine._model, passes=2)
    gateway, bus = running.gateway, running.gateway.bus
    starts: list[StartDecode] = []

    async def overhear(msg: Any) -> None:
        starts.append(decode_body(msg.data, StartDecode))

    await bus.subscribe("decode.start", overhear)
    attempts = [await gateway.send(gateway.work(prompt(20, i), 60)) for i in range(4)]
    await gateway.until(attempts[0], 3)
    stranger = starts[0].model_copy(update={"work": gateway.work(prompt(20), 5)})
    with pytest.raises(errors.Busy):
        await bus.request("decode.start", stranger, Accepted, timeout_s=2)
    brake.release()
    for at, attempt in enumerate(attempts):
        await gateway.finish(attempt)
        assert len(attempt.tokens) == 60
        assert not any(later.ended.is_set() for later in attempts[at + 1 :])


async def test_a_new_incarnation_makes_everything_stale_and_is_attached(
    running: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = running.gateway
    expected = await gateway.complete(gateway.work(prompt(40), 80))
    brake = Brake(monkeypatch, running.decode.engine._model, passes=4)
    attempt = await gateway.until(await gateway.send(gateway.work(prompt(40), 80)), 5)
    await running.manager.drain()
    running.manager = await running.start(BlockManager)
    brake.release()
    await gateway.finish(attempt, 10)
    assert attempt.error in ("Stale", "Unavailable")
    assert attempt.tokens == expected[: len(attempt.tokens)]
    assert await gateway.complete(gateway.work(prompt(40), 80), 20) == expected


async def test_a_lost_lease_is_never_read_again(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = running.gateway
    expected = await gateway.complete(gateway.work(prompt(40), 200))
    brake = Brake(monkeypatch, running.decode.engine._model, passes=4)
    attempt = await gateway.until(await gateway.send(gateway.work(prompt(40), 200, cache_salt="b")), 5)
    stream = running.decode._streams[attempt.work.request_id, 0]
    assert stream.lease is not None
    await gateway.bus.request(
        "block_manager.release", Release(holder=running.decode.instance, leases=[stream.lease]), Empty, timeout_s=2
    )
    others = [await gateway.send(gateway.work(prompt(400, i), 2, cache_salt=str(i))) for i in range(8)]
    brake.release()  # the pages have another tenant now
    await gateway.finish(attempt, 10)
    assert attempt.error == "Stale"
    assert attempt.tokens == expected[: len(attempt.tokens)]
    for other in others:
        await gateway.finish(other)


async def test_drain_hands_long_sequences_back_and_finishes_short_ones(
    running: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "ABSENT_LIMIT_S", 0.5)
    gateway, streams = running.gateway, running.decode._streams
    brake = Brake(monkeypatch, running.decode.engine._model, passes=2)
    long = await gateway.until(await gateway.send(gateway.work(prompt(40), 400)), 3)
    short = await gateway.send(gateway.work(prompt(40, 1), 30))
    await until(lambda: len(streams) == 2 and not running.decode._admissions)
    brake.allow(3)  # the one that began without it, and two with it
    await gateway.until(short, 3)
    prefilling = [await gateway.send(gateway.work(prompt(300, i), 30)) for i in range(3)]
    running_long = streams[long.work.request_id, 0]
    draining = asyncio.create_task(running.decode.drain())
    await until(lambda: running_long.stop)
    brake.release()
    await draining
    assert long.error == "Unavailable" and short.last.finish_reason == "length" and len(short.tokens) == 30
    await running.prefill.drain()
    for attempt in prefilling:
        await gateway.finish(attempt, 10)
        assert attempt.error == "Unavailable" or len(attempt.tokens) == 30


async def test_sequences_of_a_silent_gateway_are_dropped(running: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_actor, "GATEWAY_SILENCE_S", 1.0)
    brake = Brake(monkeypatch, running.decode.engine._model)
    gateway, streams = running.gateway, running.decode._streams
    living = await gateway.send(gateway.work(prompt(40), 450))
    dead = gateway.work(prompt(40), 450, gateway="gateway-dead")
    gateway.attempts[dead.request_id, 0] = unheard = type(living)(dead)
    await gateway.send(dead)
    await until(lambda: len(streams) == 2)
    silent = streams[dead.request_id, 0]
    async with asyncio.timeout(10):
        while silent.stop is None:
            await gateway.beat()
            await asyncio.sleep(0.05)
    assert isinstance(silent.stop, errors.Cancelled)
    monkeypatch.setattr(decode_actor, "GATEWAY_SILENCE_S", 60.0)  # from here on it beats once a second
    brake.release()
    await gateway.finish(living)
    assert living.last.finish_reason == "length"
    assert not unheard.items and silent.emitted < 450


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_worker_that_was_cut_off_for_a_moment_says_everything_it_has_to_say(
    running: Engines, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gateway, worker = running.gateway, getattr(running, name)
    expected = await gateway.complete(gateway.work(prompt(20), 40, cache_salt="whole"))
    brake = Brake(monkeypatch, worker.engine._model, passes=0 if name == "prefill" else 3)
    sending = asyncio.ensure_future(gateway.send(gateway.work(prompt(20), 40, cache_salt="cut")))
    await until(lambda: worker.details()["running"] == 1)
    attempt = await gateway.until(await sending, 0 if name == "prefill" else 4)  # nothing is on its way
    connection = worker.bus.connection
    tell = connection.on_lost

    def lost(error: errors.KvrelayError) -> None:
        tell(error)
        brake.release()

    monkeypatch.setattr(connection, "on_lost", lost)
    connection.client._transport.close()
    await gateway.finish(attempt, timeout_s=10)
    assert (attempt.tokens, attempt.last.finish_reason) == (expected, "length")


@pytest.mark.parametrize("actor", ["prefill", "decode"])
async def test_a_failing_model_ends_everything_at_once(
    tmp_path: Path, model: str, actor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "ABSENT_LIMIT_S", 0.5)
    async with engines(tmp_path, model=model, **OPTIONS) as running:
        gateway, worker = running.gateway, getattr(running, actor)
        broken = threading.Event()

        def fail(*_: Any, **__: Any) -> None:
            broken.wait(10)
            raise RuntimeError("the test breaks the model")

        if actor == "prefill":
            monkeypatch.setattr(worker.engine._model, "forward", fail)
        else:
            brake = Brake(monkeypatch, worker.engine._model)
        attempts = [await gateway.send(gateway.work(prompt(400, i), 100)) for i in range(4)]
        if actor == "decode":
            await until(lambda: len(worker._streams) == len(attempts) and not worker._admissions, 30)
            brake.allow(3)  # the one that began with the first alone, and two with all
            for attempt in attempts:
                await gateway.until(attempt, 3)
            monkeypatch.setattr(worker.engine._model, "forward", fail)
            brake.release()
        broken.set()
        async with asyncio.timeout(5):
            await worker.failed.wait()
            for attempt in attempts:
                await attempt.ended.wait()
        assert "Unavailable" in {attempt.error for attempt in attempts}
        with pytest.raises(errors.Unavailable):
            if actor == "prefill":
                await gateway.send(gateway.work(prompt(10), 3))
            else:
                raise errors.Unavailable((await gateway.finish(await gateway.send(gateway.work(prompt(10), 3)))).error)
        await running.until_free(10)


async def test_a_long_prompt_holds_up_neither_short_prompts_nor_decode(
    running: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = running.gateway
    steps = Brake(monkeypatch, running.decode.engine._model, passes=2)
    decoding = await gateway.until(await gateway.send(gateway.work(prompt(10), 450)), 3)
    chunks = Brake(monkeypatch, running.prefill.engine._model)
    long = await gateway.send(gateway.work(prompt(440, 1), 5))
    short = await gateway.send(gateway.work(prompt(30, 2), 5))
    steps.release()
    await gateway.until(decoding, 40)  # while the first chunk is still being computed
    chunks.allow(3)  # of the seven that the long prompt takes
    await gateway.finish(short)
    assert len(short.tokens) == 5 and not long.tokens
    chunks.release()
    await gateway.finish(long)
    assert len(long.tokens) == 5
    await gateway.finish(decoding)
