from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.admission import Admission
from shared.errors import Busy


@dataclass(frozen=True)
class Item:
    id: str
    priority: int = 0
    arrival_s: float = 0.0


def drain(queue: Admission[Item]) -> list[str]:
    out = []
    while (item := queue.pop()) is not None:
        out.append(item.id)
    return out


def test_order_is_priority_then_arrival() -> None:
    queue: Admission[Item] = Admission(8)
    for item in (Item("late", 0, 9.0), Item("early", 0, 1.0), Item("low", 5, 0.0), Item("urgent", -1, 99.0)):
        queue.admit(item)
    assert [item.id for item in queue.waiting()] == ["urgent", "early", "late", "low"]
    assert drain(queue) == ["urgent", "early", "late", "low"]


def test_a_full_queue_says_busy_but_takes_back_what_it_had_admitted() -> None:
    queue: Admission[Item] = Admission(1)
    first = Item("first", 0, 1.0)
    queue.admit(first)
    with pytest.raises(Busy) as full:
        queue.admit(Item("second", 0, 2.0))
    assert full.value.retry_after_s == 1.0
    assert queue.pop() is first
    queue.admit(Item("second", 0, 2.0))
    queue.restore(first)
    assert drain(queue) == ["first", "second"]


def test_a_removed_request_may_come_back() -> None:
    queue: Admission[Item] = Admission(4)
    item = Item("a")
    queue.admit(item)
    assert queue.remove("a") and not queue.remove("a")
    queue.restore(item)
    assert drain(queue) == ["a"]


STEPS = st.tuples(st.sampled_from("ard"), st.integers(0, 9), st.integers(-2, 2), st.integers(0, 5))


@given(st.lists(STEPS, max_size=200))
def test_against_a_sorted_list(steps: list[tuple[str, int, int, int]]) -> None:
    queue: Admission[Item] = Admission(5)
    model: dict[str, tuple[int, int, int]] = {}
    for n, (step, name, priority, arrival) in enumerate(steps):
        key = str(name)
        if step == "a" and key not in model:
            if len(model) < 5:
                queue.admit(Item(key, priority, arrival))
                model[key] = (priority, arrival, n)
            else:
                with pytest.raises(Busy):
                    queue.admit(Item(key, priority, arrival))
        elif step == "r":
            assert queue.remove(key) == (model.pop(key, None) is not None)
        elif step == "d":
            item = queue.pop()
            want = min(model, key=model.__getitem__, default=None)
            assert (item and item.id) == want
            if want is not None:
                del model[want]
        assert len(queue) == len(model)
        assert [item.id for item in queue.waiting()] == sorted(model, key=model.__getitem__)
