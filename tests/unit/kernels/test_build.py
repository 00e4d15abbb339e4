"""The native library: built once however many ask, refused clearly, and called from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, packing
from kernels.cpu.argmax_rows import argmax_rows
from kernels.cpu.linear import PackedLinear, linear
from kernels.reference.argmax_rows import argmax_rows as plain_argmax_rows
from shared.models.catalogue import models_dir

QUICK = ("argmax_rows.c", "tails.c", "threads.c")
"""Sources that are compiled in a moment."""
PRINT_PATH = "from kernels.cpu import build; print(build.build()); build.load()"


def run(environment: dict[str, str], code: str = PRINT_PATH) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def few_sources(tmp_path: Path, code: str) -> str:
    """The same with the quick sources only."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in [*build.SOURCES.glob("*.h"), *(build.SOURCES / name for name in QUICK)]:
        shutil.copy(path, sources)
    return f"from pathlib import Path; from kernels.cpu import build; build.SOURCES = Path({str(sources)!r}); {code}"


def test_concurrent_first_use_builds_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    compiler = tmp_path / "counting-cc"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {count};; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    code = few_sources(tmp_path, PRINT_PATH)
    environment = {"KVRELAY_CACHE_DIR": str(tmp_path / "cache"), "CC": str(compiler), "KVRELAY_CPU_ISA": "portable"}
    outputs = [process.communicate() for process in [run(environment, code) for _ in range(3)]]
    assert len({out for out, _ in outputs}) == 1, outputs
    assert count.read_text().count("x") == len(QUICK) + 1  # each file, and the link
    left = {path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()}
    assert left == {".o", ".so", ".lock"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("suffixes", [{".so"}, {".so", ".o"}], ids=["library", "all"])
def test_files_that_a_crash_left_unfinished_are_made_again(suffixes: set[str], share: float, tmp_path: Path) -> None:
    code = few_sources(tmp_path, PRINT_PATH)
    environment = {"KVRELAY_CACHE_DIR": str(tmp_path / "cache"), "KVRELAY_CPU_ISA": "portable"}
    first, error = run(environment, code).communicate()
    assert first, error
    for path in (tmp_path / "cache" / "kernels").iterdir():
        if path.suffix in suffixes:
            os.truncate(path, int(share * path.stat().st_size))
    process = run(environment, code)
    assert (process.communicate()[0], process.returncode) == (first, 0)
    assert Path(first.strip()).stat().st_size > 0


def test_libraries_and_models_are_in_one_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for own, xdg, root in (
        ("~/here", "/elsewhere", tmp_path / "here"),
        ("/there", "", Path("/there")),
        ("", "/elsewhere", Path("/elsewhere/kvrelay")),
        ("", "", tmp_path / ".cache/kvrelay"),
    ):
        monkeypatch.setenv("KVRELAY_CACHE_DIR", own)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert (build.cache_dir(), models_dir()) == (root / "kernels", root / "models")


def test_no_compiler_means_reference(tmp_path: Path) -> None:
    code = "from kernels.dispatch import select; print(select('auto').name)"
    environment = {"KVRELAY_CACHE_DIR": str(tmp_path), "CC": str(tmp_path / "missing"), "CUDA_VISIBLE_DEVICES": ""}
    out, error = run(environment, code).communicate()
    assert out.strip() == "reference", error


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CC": "/bin/false"}, "failed"),
        ({"CC": "/missing/cc"}, "no C compiler"),
        ({"CC": 'cc "'}, "No closing"),
        ({"KVRELAY_CPU_ISA": "z80"}, "z80"),
    ],
)
def test_what_cannot_be_built_is_said(environment: dict[str, str], words: str, tmp_path: Path) -> None:
    process = run({"KVRELAY_CACHE_DIR": str(tmp_path), **environment})
    _, error = process.communicate()
    assert process.returncode
    assert "BuildError" in error and words in error


def weight() -> PackedLinear:
    data = packing.pack_dense(torch.randn(300, 64))
    room = torch.empty(data.numel() + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return PackedLinear(packing.F32, 300, 64, room[start : start + data.numel()].view(data.shape).copy_(data))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_callers_on_several_threads_do_not_disturb_each_other(threads: int) -> None:
    build.set_threads(threads)
    packed, inputs = weight(), [torch.randn(40, 64) for _ in range(8)]
    expected = [linear(x, packed) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            assert all(map(torch.equal, pool.map(lambda x: linear(x, packed), inputs), expected))
    build.set_threads(2)


def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
import os, torch
from kernels.cpu import build
from tests.unit.kernels.test_build import linear, weight
build.set_threads(2)
packed, x = weight(), torch.randn(40, 64)
expected = linear(x, packed)
child = os.fork()
if child == 0:
    os._exit(0 if all(torch.equal(linear(x, packed), expected) for _ in range(50)) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    process = run({}, code)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error


def test_argmax_takes_the_lowest_index_and_says_where_nan_is() -> None:
    logits = torch.randn(5, 1003)
    logits[0, [7, 500, 1002]] = 9.0
    logits[1, 1002] = 9.0
    logits[2] = -torch.inf
    logits[3, 3], logits[3, 4] = torch.nan, 9.0
    logits[4] = 1.0
    assert argmax_rows(logits).tolist() == [7, 1002, 0, -1, 0]
    assert plain_argmax_rows(logits).tolist() == [7, 1002, 0, -1, 0]
    logits[0, 1002] = torch.nan  # behind the last whole vector
    assert argmax_rows(logits)[0] == plain_argmax_rows(logits)[0] == -1
