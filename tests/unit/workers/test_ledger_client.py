"""Batching, order and repetition of what a worker tells the ledger; leases that are kept, lost, or not surely ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared import lease_keeper, ledger_client
from shared.actor import Actor, Call, handles
from shared.bus import Bus
from shared.errors import Unavailable
from shared.handles import BlockTable, pack_u32
from shared.lease_keeper import LeaseKeeper
from shared.ledger_client import LedgerClient
from shared.messages import Commit, Empty, Extend, Extended, Release, Renew, Renewed
from tests.conftest import Connect
from tests.support.actors import running
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until


class Ledger(Actor):
    """A block manager that notes what it is asked and answers what the test says."""

    name = "block_manager"

    async def setup(self) -> None:
        self.asked: list[Any] = []
        self.room = True
        self.lost: list[int] = []
        self.failures = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def note(self, message: Any) -> None:
        self.asked.append(message)
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise Unavailable("the test says so")

    @handles("commit", Commit)
    async def commit(self, message: Commit, call: Call) -> Renewed:
        await self.note(message)
        return Renewed(lost=self.lost)

    @handles("extend", Extend)
    async def extend(self, message: Extend, call: Call) -> Extended:
        await self.note(message)
        full = BlockTable(pool="p", epoch=1, indices=pack_u32([7]), generations=pack_u32([3]))
        empty = BlockTable(pool="p", epoch=1)
        tables = [full if self.room else empty for _ in message.items]
        return Extended(tables=tables, victim=None if self.room else 99, lost=self.lost)

    @handles("release", Release)
    async def release(self, message: Release, call: Call) -> Empty:
        await self.note(message)
        return Empty()

    @handles("renew", Renew)
    async def renew(self, message: Renew, call: Call) -> Renewed:
        await self.note(message)
        return Renewed(lost=self.lost)


class Heard:
    """What the client said back."""

    def __init__(self) -> None:
        self.grants: list[tuple[int, list[int]]] = []
        self.victims: list[int] = []
        self.lost: list[int] = []

    def grant(self, lease: int, table: BlockTable) -> None:
        self.grants.append((lease, [handle.index for handle in table.handles()]))


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    return await connect()


@pytest.fixture
async def ledger(connect: Connect, namespace: str) -> AsyncIterator[Ledger]:
    async with running(Ledger, await connect(), namespace=namespace) as started:
        yield started


@pytest.fixture
async def heard() -> Heard:
    return Heard()


@pytest.fixture
async def client(bus: Bus, ledger: Ledger, heard: Heard) -> AsyncIterator[LedgerClient]:
    made = LedgerClient(bus, "w", heard.grant, heard.victims.append, heard.lost.extend)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()


async def test_one_round_holds_everything_that_is_due_in_order(
    client: LedgerClient, ledger: Ledger, heard: Heard
) -> None:
    client.release(5)
    client.commit(1, 0, b"k" * 16)
    client.extend(1, 1)
    client.extend(2, 1)
    client.commit(2, 3, b"l" * 16)
    await client.settled()
    kinds = [type(message).__name__ for message in ledger.asked]
    assert kinds == ["Commit", "Extend", "Release"]
    assert [item.lease for item in ledger.asked[0].items] == [1, 2]
    assert heard.grants == [(1, [7]), (2, [7])]


async def test_what_comes_during_a_round_goes_into_the_next(client: LedgerClient, ledger: Ledger) -> None:
    ledger.gate.clear()
    client.commit(1, 0, b"k" * 16)
    while not ledger.asked:
        await asyncio.sleep(0)
    for page in range(1, 4):
        client.commit(1, page, b"k" * 16)
    waiting = asyncio.create_task(client.settled())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    ledger.gate.set()
    await waiting
    assert [len(message.items) for message in ledger.asked] == [1, 3]


async def test_refused_extensions_are_asked_again_and_stop_with_the_lease(
    client: LedgerClient, ledger: Ledger, heard: Heard
) -> None:
    ledger.room = False
    client.extend(1, 1)
    client.extend(2, 1)
    await client.settled()
    assert client.starved == 2 and heard.victims == [99] and heard.grants == []
    client.release(2)
    ledger.room = True
    client.poke()
    await client.settled()
    assert heard.grants == [(1, [7])] and client.starved == 0
    ledger.room = False
    client.extend(3, 1)
    await client.settled()
    ledger.room = True
    await until(lambda: (3, [7]) in heard.grants)  # no event: it asks by itself


async def test_an_unanswered_release_is_repeated(
    client: LedgerClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_client, "UNANSWERED_RETRY_S", 0.02)
    ledger.failures = 2
    client.release(4)
    await until(lambda: len(ledger.asked) == 3)
    await client.settled()
    await asyncio.sleep(0.1)  # it is not asked again
    assert [message.leases for message in ledger.asked] == [[4], [4], [4]]


async def test_lost_leases_are_reported(client: LedgerClient, ledger: Ledger, heard: Heard) -> None:
    ledger.lost = [1]
    client.commit(1, 0, b"k" * 16)
    await client.settled()
    client.extend(1, 1)
    await client.settled()
    assert heard.lost == [1, 1] and heard.grants == [] and client.starved == 0


async def test_leases_are_renewed_in_one_message_and_the_fence_moves(bus: Bus, ledger: Ledger) -> None:
    clock, lost, renewed = ManualClock(), [], asyncio.Event()
    keeper = LeaseKeeper(bus, "w", lost.extend, renewed.set, clock.monotonic)
    assert keeper.safe() and keeper.fence == float("inf")
    keeper.add(1, 9.0, clock.monotonic())
    keeper.add(2, 9.0, clock.monotonic())
    await clock.advance(8.0)
    assert keeper.safe()
    await clock.advance(0.2)
    assert not keeper.safe()
    assert await keeper.renew() and keeper.safe() and renewed.is_set()
    assert [message.leases for message in ledger.asked] == [[1, 2]]
    ledger.failures = 1
    await clock.advance(9)
    assert not await keeper.renew() and not keeper.safe()
    ledger.lost = [2]
    assert await keeper.renew()
    assert lost == [2] and len(keeper) == 1 and keeper.safe()
    keeper.drop(1)
    keeper.drop(1)
    assert keeper.fence == float("inf")


async def test_the_loop_renews_by_itself(bus: Bus, ledger: Ledger) -> None:
    keeper = LeaseKeeper(bus, "w", lambda _: None)
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    assert ledger.asked == []
    keeper.add(1, 0.3, asyncio.get_running_loop().time())
    await until(lambda: len(ledger.asked) >= 3)
    task.cancel()


async def test_after_a_doubt_nothing_is_renewed_for_a_while(
    ledger: Ledger, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that came too late may have been a lease; who renews without it will not write under it."""
    for name in ("DOUBT_S", "RETRY_S"):
        monkeypatch.setattr(lease_keeper, name, 0.01)
    keeper = LeaseKeeper(bus, "w", lambda _: None)
    loop = asyncio.ensure_future(keeper.run())
    ledger.failures = 2
    keeper.doubt()
    await until(lambda: len(ledger.asked) == 2 + lease_keeper.DOUBT_ROUNDS)
    assert ledger.asked == [Renew(holder="w", leases=[])] * len(ledger.asked)
    await asyncio.sleep(0.1)
    assert len(ledger.asked) == 2 + lease_keeper.DOUBT_ROUNDS  # and then it is quiet again
    loop.cancel()
