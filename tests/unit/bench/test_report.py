"""The table and the JSON every benchmark prints."""

from __future__ import annotations

import json

import pytest

from infra.bench import report


def test_numbers_align_right_and_text_left() -> None:
    rows: list[report.Row] = [{"name": "a", "us": 1234.5, "x": 2.345}, {"name": "bb", "us": 7, "x": None}]
    assert report.table(rows).splitlines() == [
        "name     us     x",
        "----  -----  ----",
        "a     1,234  2.35",
        "bb        7     -",
    ]
    assert report.table([]) == "(nothing measured)"


def test_the_best_is_the_tenth_percentile_of_what_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = 0.0, iter([9.0, *map(float, range(20, 0, -1)), 100.0])  # the first one warms up

    def run() -> None:
        nonlocal now
        now += next(durations)

    with monkeypatch.context() as patch:
        patch.setattr(report.time, "perf_counter", lambda: now)
        assert report.best_seconds(run, budget_s=210.0) == 3.0
        now, durations = 0.0, iter([0.0, 5.0, 1.0, 4.0, 3.0, 2.0])
        assert report.best_seconds(run, budget_s=0.0, least=5) == 1.0


def test_json_carries_the_machine_and_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    report.show("speed", [{"n": 1}], as_json=True, notes={"threads": 2})
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "speed" and found["rows"] == [{"n": 1}] and found["threads"] == 2
    assert found["machine"]["cores"] >= 1 and found["machine"]["torch"]
