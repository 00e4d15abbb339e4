"""When a dead process is started again."""

from services.cli.backoff import FORGIVEN_AFTER_S, LONGEST_S, Backoff


def test_the_first_restart_is_at_once_and_the_next_wait_ever_longer() -> None:
    backoff = Backoff()
    assert [backoff.next_delay(0.1) for _ in range(8)] == [0, 0.25, 0.5, 1, 2, 4, 8, LONGEST_S]


def test_a_process_that_lived_long_is_forgiven() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_delay(0.1)
    assert backoff.next_delay(FORGIVEN_AFTER_S) == 0
    assert backoff.next_delay(FORGIVEN_AFTER_S - 1) == 0.25
