"""A real NATS server and a real gateway before workers that do as a test tells them.

They speak the protocol but play a script instead of a model, so a test can lose, repeat, delay and kill what it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx

from infra.nats.server import NatsServer
from services.cli.child import die_with_parent
from services.gateway.actor import Gateway
from shared import telemetry
from shared.actor import Actor
from shared.bus import Bus
from shared.call import Call
from shared.errors import KvrelayError
from shared.handles import unpack_u32
from shared.messages import (
    Accepted,
    ActorExited,
    Attach,
    CancelWork,
    Generate,
    Generated,
    PoolDescription,
    RunPrefill,
    TokenBatch,
    TokenItem,
    WireError,
    Work,
)
from shared.models.files import ModelFiles, prepare
from shared.models.tokenizer import Tokenizer
from shared.pool.layout import layout_for
from shared.route import handles
from shared.settings import (
    BlockManagerSettings,
    CommonSettings,
    DecodeSettings,
    OffloadSettings,
    PrefillSettings,
)

CONTEXT = 512
Script = Callable[["Worker", Work], Awaitable[None]]


def client_id(work_id: str) -> str:
    """The id a client gave its request, if it has no dots."""
    return work_id.partition(".")[0]


class Worker(Actor):
    """What prefill and decode have in common: they send token items and note what they are told to drop."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.cancelled: list[tuple[str, int]] = []
        self.told = asyncio.Event()
        self.report: dict[str, Any] = {}

    def details(self) -> dict[str, Any]:
        return self.report

    @handles("cancel", CancelWork, to="instance")
    def cancel(self, message: CancelWork, call: Call) -> None:
        self.cancelled.append((client_id(message.request_id), message.attempt))
        self.told.set()

    async def send(self, work: Work, index: int, tokens: list[int], *, error: str = "", **fields: Any) -> None:
        """One item in a batch of its own."""
        problem = WireError(kind=error, text=f"scripted {error}") if error else None
        item = TokenItem(
            request_id=work.request_id, attempt=work.attempt, index=index, tokens=tokens, error=problem, **fields
        )
        await self.bus.publish(f"gateway.tokens.{work.gateway}", TokenBatch(worker=self.instance, items=[item]))
        for _ in range(
            2
        ):  # decode never overtakes prefill. nats-py's ping overtakes what it has buffered; a second does not
            await self.bus.connection.client.flush()


class ScriptedPrefill(Worker):
    name: ClassVar[str] = "prefill"
    Settings: ClassVar[type[CommonSettings]] = PrefillSettings
    script: Script
    refusals: list[KvrelayError]
    orders: list[Work]

    @handles("run", RunPrefill)
    async def run(self, message: RunPrefill, call: Call) -> Accepted:
        self.orders.append(message.work)
        if self.refusals:
            raise self.refusals.pop(0)
        self.spawn("script", self.script(self, message.work))  # type: ignore[arg-type]
        return Accepted(worker=self.instance)


class ScriptedDecode(Worker):
    name: ClassVar[str] = "decode"
    Settings: ClassVar[type[CommonSettings]] = DecodeSettings


class ScriptedBlockManager(Actor):
    name: ClassVar[str] = "block_manager"
    Settings: ClassVar[type[CommonSettings]] = BlockManagerSettings
    files: ModelFiles

    @handles("attach", Attach)
    def attach(self, message: Attach, call: Call) -> PoolDescription:
        layout = layout_for(self.files, self.settings)
        assert message.fingerprint == layout.fingerprint
        return PoolDescription(
            pool=message.pool, kind="shm", path="/", epoch=1, blocks=64, tails=4, layout=layout, max_model_len=CONTEXT
        )


class ScriptedOffload(Actor):
    name: ClassVar[str] = "offload"
    Settings: ClassVar[type[CommonSettings]] = OffloadSettings


@functools.cache
def _model() -> tuple[ModelFiles, Tokenizer]:
    files = prepare("smollm2-135m", "bfloat16")
    return files, Tokenizer.load(files)


class Stage:
    """Everything a test touches."""

    def __init__(self, nats: NatsServer, state: Path) -> None:
        self.nats = nats
        self.state = state
        self.files, self.tokenizer = _model()
        self.actors: list[Actor] = []
        self.buses: list[Bus] = []
        self.script: Script
        self.answer: list[int]
        self.refusals: list[KvrelayError] = []
        self.orders: list[Work] = []

    async def bus(self, role: str) -> Bus:
        known = self.nats.credentials.roles[role]
        bus = await Bus.connect(self.nats.url, user=known.user, password=known.password, name=role)
        self.buses.append(bus)
        return bus

    async def start(self, kind: type[Actor], **settings: Any) -> Any:
        """Starts an actor, with the script and its notes if it is a prefill worker."""
        actor = kind(await self.bus(kind.name), kind.Settings(state_dir=self.state, **settings))
        actor.script, actor.refusals, actor.orders = self._script, self.refusals, self.orders  # type: ignore[attr-defined]
        actor.files = self.files  # type: ignore[attr-defined]
        await actor.start()
        self.actors.append(actor)
        return actor

    async def kill(self, actor: Actor, *, seen: bool = True) -> None:
        """The process dies: its connection closes. `seen`: the supervisor tells everybody."""
        self.actors.remove(actor)
        await actor.bus.close()
        if seen:
            event = ActorExited(actor=actor.name, instance=actor.instance, pid=1, code=-9)
            await self.admin.publish("event.actor.exited", event)

    async def play(self, worker: Worker, work: Work) -> None:
        """What a healthy pipeline does: first token by prefill, the others by decode, ended by length."""
        first = len(unpack_u32(work.tokens)) - work.prompt_tokens
        answer = self.answer
        last = min(work.max_tokens, len(answer)) - 1
        for index in range(first, last + 1):
            speaker = worker if index == first else self.decode
            head = {"cached_tokens": 0, "compute_s": 0.001} if index == first else {}
            end = {"finish_reason": "length", "pages": 3} if index == last else {}
            await speaker.send(work, index, [answer[index]], **head, **end)

    def reset(self) -> None:
        """As after the start, but for what metrics have counted."""
        assert not self.gateway._dispatcher.live, "an earlier test left a request behind"
        self.script = self.play
        self.answer = self.tokenizer.encode("The quick brown fox jumps over the lazy dog.")
        self.prefill.report = self.decode.report = {}
        for notes in (self.refusals, self.orders, self.prefill.cancelled, self.decode.cancelled):
            notes.clear()
        self.prefill.told.clear()
        self.decode.told.clear()
        self.gateway._dispatcher.placement.queue.bound = 256

    async def _script(self, worker: Worker, work: Work) -> None:
        await self.script(worker, work)

    async def __aenter__(self) -> Stage:
        telemetry.setup("gateway", "test", None)
        await self.nats.start()
        self.admin = await self.bus("admin")
        self.client = await self.bus("client")
        await self.start(ScriptedBlockManager)
        self.gateway: Gateway = await self.start(Gateway, http_port=0)
        await self.start(ScriptedOffload)
        self.prefill: ScriptedPrefill = await self.start(ScriptedPrefill)
        self.decode: ScriptedDecode = await self.start(ScriptedDecode)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.gateway.details()['http_port']}", timeout=20)
        while (await self.http.get("/health")).status_code != 200:
            for actor in self.actors:
                await actor.announce()  # without waiting for its next heartbeat
            await asyncio.sleep(0.01)
        self.reset()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        for actor in reversed(self.actors):
            with contextlib.suppress(KvrelayError):
                await asyncio.wait_for(actor.drain(), 5)
        for bus in self.buses:
            await bus.close()
        await self.nats.stop()
        telemetry.shutdown()


@contextlib.asynccontextmanager
async def stage(state: Path) -> AsyncIterator[Stage]:
    async with Stage(NatsServer(state, preexec=die_with_parent()), state) as ready:
        yield ready


async def ask(on: Stage, timeout_s: float = 15, **fields: Any) -> Generated:
    """One whole answer by NATS."""
    message = Generate(**{"prompt": "Tell me about foxes.", **fields})
    return await on.client.request("gateway.generate", message, Generated, timeout_s=timeout_s)


async def stream(on: Stage, **fields: Any) -> tuple[str, list[int], Generated]:
    """Joined text and tokens, and the last event; checks what every stream must obey."""
    message = Generate(**{"prompt": "Tell me about foxes.", "stream": True, **fields})
    events = [event async for event in on.client.stream("gateway.generate", message, Generated)]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    last = events[-1]
    assert last.finish_reason is not None and not last.text and not last.token_ids
    assert {event.request_id for event in events} == {last.request_id}
    return "".join(e.text for e in events), [t for e in events for t in e.token_ids], last


def live(on: Stage) -> int:
    """How many requests the gateway serves."""
    return len(on.gateway._dispatcher.live)


def owners(on: Stage) -> list[str]:
    """Workers that the gateway believes to be at work."""
    return [name for one in on.gateway._dispatcher.live.values() for name in one.request.owners()]
