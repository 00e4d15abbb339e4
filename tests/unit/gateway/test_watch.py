from __future__ import annotations

from services.gateway.watch import KINDS, Watch
from shared.messages import ActorExited, Heartbeat


def beat(actor: str, name: str = "1", ready: bool = True, draining: bool = False, **details: int) -> Heartbeat:
    return Heartbeat(actor=actor, instance=f"{actor}-{name}", pid=7, ready=ready, draining=draining, details=details)


def test_all_kinds_must_be_ready() -> None:
    watch = Watch()
    for kind in KINDS:
        assert kind in watch.missing()
        assert watch.beat(beat(kind), 0.0)
        assert not watch.beat(beat(kind), 1.0)
    assert watch.missing() == []
    assert watch.beat(beat("decode", draining=True), 2.0)
    assert watch.missing() == ["decode"]
    assert [entry["actor"] for entry in watch.report(2.5)] == sorted(KINDS)


def test_silence_is_death_until_the_next_heartbeat() -> None:
    watch = Watch(silence_s=3.5)
    watch.beat(beat("decode"), 0.0)
    for now in (1.0, 2.0, 3.0, 3.5):
        assert watch.sweep(now) == []
    assert watch.sweep(3.6) == [("decode-1", 3.6)]
    assert watch.sweep(4.6) == []
    assert watch.beat(beat("decode"), 5.0)
    assert watch.ready("decode") == ["decode-1"]


def test_an_exited_instance_stays_dead() -> None:
    watch = Watch()
    watch.beat(beat("decode"), 0.0)
    gone = ActorExited(actor="decode", instance="decode-1", pid=7, code=-9)
    assert watch.exited(gone)
    assert not watch.exited(gone)
    assert not watch.beat(beat("decode"), 0.1)
    assert watch.ready("decode") == []


def test_our_own_absence_kills_nobody() -> None:
    watch = Watch(silence_s=3.5)
    watch.beat(beat("decode"), 0.0)
    watch.sweep(0.5)
    assert watch.sweep(60.0) == []  # this process slept; the heartbeats are still in the socket
    assert watch.sweep(61.0, connected=False) == []
    assert watch.sweep(62.0) == []
    assert watch.sweep(63.0) == []
    assert [name for name, _ in watch.sweep(64.5)] == ["decode-1"]


def test_the_kind_of_an_instance_with_a_name_of_its_own() -> None:
    watch = Watch()
    watch.beat(Heartbeat(actor="block_manager", instance="node7", pid=7, ready=True), 0.0)
    assert watch.kind_of("node7") == "block_manager"
    assert watch.kind_of("prefill-a1b2c3") == "prefill"


def test_who_computes_may_not_have_come_to_speak() -> None:
    watch = Watch()
    for now, steps in enumerate((4, 4, 5, 5, 6, 6, 7, 7, 8)):
        watch.beat(beat("decode", running=1, steps=steps), float(now))
    for since, further in ((8.0, 0), (7.0, 1), (6.0, 1), (5.5, 2), (4.0, 2), (3.0, 3)):
        told = [watch.computing("decode-1", since, steps) for steps in (1, 2, 3)]
        assert told == [further < 1, further < 2, further < 3], since


def test_who_computes_is_ready_and_has_something_to_compute() -> None:
    watch = Watch()
    assert not watch.computing("decode-1", 0.0, 2)
    for told, computing in (
        (beat("decode", running=2, steps=1), True),
        (beat("decode", draining=True, running=2, steps=1), True),
        (beat("decode", ready=False, running=2, steps=1), False),
        (beat("decode", running=0, waiting=2, steps=1), False),
        (beat("decode", running=2), False),
        (beat("decode", steps=1), False),
    ):
        watch = Watch()
        watch.beat(told, 0.0)
        assert watch.computing("decode-1", 0.0, 2) is computing, told
