from __future__ import annotations

import pytest

from shared.recent import Recent


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_last_keys_are_known_and_older_ones_forgotten(size: int) -> None:
    recent: Recent[int] = Recent(size)
    for key in range(size + 1):
        recent.add(key)
    assert [key in recent for key in range(size + 1)] == [False] + [True] * size


def test_a_key_that_comes_again_is_the_newest_and_counts_once() -> None:
    recent: Recent[str] = Recent(2)
    for key in "abac":
        recent.add(key)
    assert "a" in recent and "c" in recent and "b" not in recent


def test_a_key_can_be_taken_back() -> None:
    recent: Recent[str] = Recent(2)
    recent.add("a")
    recent.discard("a")
    recent.discard("never there")
    assert "a" not in recent
