"""The GPU check without a GPU: what it does with its parts, and its pipelines on pools in host memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.bench import gpu_check, gpu_pipeline
from infra.bench.gpu_pipeline import Run, Wrong
from infra.bench.report import Row


def parts(quick: bool) -> Iterator[gpu_check.Section]:
    """One that passes, one below its target, one that is wrong and one that breaks."""

    def wrong() -> list[Row]:
        raise Wrong("not the same", [{"case": "a"}])

    def broken() -> list[Row]:
        raise OSError("no such thing\nand more")

    yield gpu_check.run_section("good", lambda: [{"x": 1, "target": "met"}])
    yield gpu_check.run_section("slow", lambda: [{"x": 1, "target": "below 70%"}])
    yield gpu_check.run_section("wrong", wrong)
    yield gpu_check.run_section("broken", broken)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "gpu.md"
    page.write_text(f"# On GPUs\n\n{gpu_check.NOT_YET} More.\n\n## Results\n")
    monkeypatch.setattr(gpu_check, "RECORD", page)
    monkeypatch.setattr(gpu_check, "why_not", lambda: "")
    monkeypatch.setattr(gpu_check, "where", lambda: {"gpu": "A GPU", "date": "today", "sm": "9.0"})
    monkeypatch.setattr(gpu_check, "check", parts)
    return page


def test_every_part_is_kept_and_shown_whatever_became_of_it(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 1
    kept, shown = record.read_text(), capsys.readouterr().out
    assert gpu_check.NOT_YET not in kept and kept.count("## A GPU, today") == 1
    for text in ("good: passed", "slow: below target", "wrong: not the same", "broken: OSError: no such thing ("):
        assert kept.count(f"### {text}") == shown.count(f"### {text}") == 1
    assert "1 of 4 parts passed" in shown


def test_json_and_a_page_left_alone(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = record.read_text()
    assert gpu_check.main(["--json", "--no-record"]) == 1
    assert record.read_text() == before
    found = json.loads(capsys.readouterr().out)
    assert [part["passed"] for part in found["sections"]] == [True, False, False, False]
    assert found["machine"]["gpu"] == "A GPU"


def test_what_keeps_a_machine_from_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if not gpu_check.why_not():
        pytest.skip("there is a GPU here")
    assert gpu_check.main([]) == 1
    assert "gpu-check cannot run: torch" in capsys.readouterr().err


def test_measurements_stop_at_the_limit() -> None:
    rows: list[Row] = [{"x": 1}, {"x": 2}]
    assert gpu_check.until(time.monotonic() + 60, iter(rows)) == rows
    with pytest.raises(Wrong, match="limit of 600 s") as stopped:
        gpu_check.until(time.monotonic() - 1, iter(rows))
    assert stopped.value.rows == rows[:1]


def test_pipelines_stop_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pipeline, "LIMIT_S", 0.5)
    started = time.monotonic()
    with pytest.raises(Wrong, match="cuda0/cuda0/float32/auto: TimeoutError"):
        gpu_pipeline.pipelines()
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_pipelines_of_one_and_two_pools_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pipeline, "TOKENS", 8)
    monkeypatch.setattr(gpu_pipeline, "RUNS", (Run("cpu0", "cpu0", "float32"), Run("cpu0", "cpu1", "float32")))
    rows = gpu_pipeline.pipelines()
    assert [(row["decode"], row["request"]) for row in rows] == [
        (pool, number) for pool in ("cpu0", "cpu1") for number in (1, 2, 3)
    ]
    assert all(row["answer"] == rows[0]["answer"] != "" for row in rows)


@pytest.mark.slow
def test_a_pipeline_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pipeline, "RUNS", (Run("cpu0", "cpu0", "float32", "no_such_format"),))
    with pytest.raises(Wrong, match="cpu0/cpu0/float32/no_such_format: RuntimeError: kvrelay up ended"):
        gpu_pipeline.pipelines()
