"""What every eviction policy owes the ledger."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.block_manager import eviction
from shared.errors import Misconfigured

BLOCKS = 12
POLICIES = eviction.names()


def test_policies_are_found_by_file_name() -> None:
    assert "lru" in POLICIES and "base" not in POLICIES
    with pytest.raises(Misconfigured, match="lru"):
        eviction.create("nonsense", BLOCKS)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), st.integers(0, BLOCKS - 1)), max_size=60))
def test_it_holds_exactly_what_was_given_to_it(name: str, steps: list[tuple[str, int]]) -> None:
    policy, held = eviction.create(name, BLOCKS), set[int]()
    for step, block in steps:
        if step == "add" and block not in held:
            policy.add(block)
            held.add(block)
        elif step == "remove" and block in held:
            policy.remove(block)
            held.remove(block)
        elif step == "pop" and held:
            expected = next(iter(policy))
            popped = policy.pop()
            assert popped == expected and popped in held
            held.remove(popped)
        assert len(policy) == len(held) and set(policy) == held


@pytest.mark.parametrize("name", POLICIES)
def test_misuse_is_refused(name: str) -> None:
    policy = eviction.create(name, BLOCKS)
    with pytest.raises(LookupError):
        policy.pop()
    with pytest.raises(ValueError, match="not evictable"):
        policy.remove(3)
    policy.add(3)
    with pytest.raises(ValueError, match="already"):
        policy.add(3)


def test_lru_evicts_the_least_recently_used() -> None:
    policy = eviction.create("lru", BLOCKS)
    for block in (4, 2, 7):
        policy.add(block)
    policy.remove(4)
    policy.add(4)
    assert [policy.pop() for _ in range(3)] == [2, 7, 4]
