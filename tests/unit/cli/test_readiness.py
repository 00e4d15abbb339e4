"""Readiness from heartbeats."""

from services.cli.readiness import Readiness
from shared.messages import Heartbeat


def beat(instance: str, ready: bool, reason: str = "") -> Heartbeat:
    return Heartbeat(actor=instance.partition("-")[0], instance=instance, pid=1, ready=ready, reason=reason)


def test_all_must_be_ready_and_each_becomes_so_once() -> None:
    readiness = Readiness()
    names = {"gateway": "gateway-1", "decode": "decode-1"}
    assert readiness.waiting(names) == "gateway, decode"
    assert not readiness.note(beat("decode-1", False, "loading"))
    assert readiness.waiting(names) == "gateway, decode (loading)"
    assert readiness.note(beat("decode-1", True))
    assert not readiness.note(beat("decode-1", True))
    assert readiness.note(beat("gateway-1", True))
    assert readiness.waiting(names) == ""


def test_a_dead_instance_is_not_ready() -> None:
    readiness = Readiness()
    readiness.note(beat("decode-1", True))
    readiness.forget("decode-1")
    readiness.forget("decode-1")
    assert readiness.waiting({"decode": "decode-1"}) == "decode"
