"""How often a victim is asked to go."""

from __future__ import annotations

from services.block_manager.reminders import AGAIN_S, Reminders
from tests.support.ledgers import ManualClock


def test_each_victim_is_asked_at_once_and_then_once_a_second() -> None:
    clock = ManualClock()
    reminders = Reminders(clock)
    assert [reminders.due(lease) for lease in (7, 8, 7, 8)] == [True, True, False, False]
    clock.now += 0.9 * AGAIN_S
    assert not reminders.due(7)
    clock.now += 0.1 * AGAIN_S
    assert [reminders.due(lease) for lease in (7, 7, 8)] == [True, False, True]
