"""`make bench` finds its benchmarks by their files."""

from __future__ import annotations

import pytest

from infra.bench import __main__ as bench


def test_every_benchmark_of_the_short_run_exists_and_says_what_it_measures() -> None:
    known = bench.benchmarks()
    assert set(bench.SHORT) <= set(known)
    assert "report" not in known and "__main__" not in known
    assert all(known.values())


def test_the_list_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in bench.benchmarks())


def test_one_is_run_with_its_own_options_and_its_exit_code_counts(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["peers", "--help"]) == 0
    assert "--servers" in capfd.readouterr().out
    assert bench.main(["peers", "--no-such-option"]) == 2


def test_an_unknown_one_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err
