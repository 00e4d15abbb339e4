from __future__ import annotations

from services.gateway.watch import KINDS, Watch
from shared.messages import ActorExited, Heartbeat


def beat(actor: str, name: str = "1", ready: bool = True, draining: bool = False) -> Heartbeat:
    return Heartbeat(actor=actor, instance=f"{actor}-{name}", pid=7, ready=ready, draining=draining)


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
