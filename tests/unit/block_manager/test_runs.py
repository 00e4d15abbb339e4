"""Free runs against a plain set."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.block_manager.runs import FreeRuns


def test_the_smallest_run_that_fits_is_taken() -> None:
    runs = FreeRuns(32)
    blocks = runs.take(32)
    assert blocks == list(range(32)) and len(runs) == 0
    for block in (*range(0, 8), *range(10, 13), *range(20, 30)):
        runs.add(block)
    assert runs.take(3) == [10, 11, 12]
    assert runs.take(4) == [0, 1, 2, 3]
    assert runs.take(2, near=20) == [20, 21]
    assert sorted(runs.take(12)) == [4, 5, 6, 7, *range(22, 30)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_as_a_set(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 40))
    runs, free = FreeRuns(total), set(range(total))
    for _ in range(data.draw(st.integers(0, 30))):
        used = sorted(set(range(total)) - free)
        if used and data.draw(st.booleans()):
            block = data.draw(st.sampled_from(used))
            runs.add(block)
            free.add(block)
        elif free:
            near = data.draw(st.none() | st.integers(0, total))
            whole = runs.runs()
            taken = runs.take(data.draw(st.integers(1, len(free))), near)
            assert set(taken) <= free and len(set(taken)) == len(taken)
            if near not in whole and any(length >= len(taken) for length in whole.values()):
                assert taken == list(range(taken[0], taken[0] + len(taken)))
            free -= set(taken)
        found = {start + i for start, length in runs.runs().items() for i in range(length)}
        assert found == free and len(runs) == len(free)
        starts = runs.runs()
        assert all(start + length not in starts for start, length in starts.items()), "runs must be merged"
