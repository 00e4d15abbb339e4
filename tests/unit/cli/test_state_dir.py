"""One pipeline per state directory; clear words when that cannot be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.state_dir import StateDir, running
from shared.errors import Misconfigured


def test_is_private_and_describes_the_run_until_closed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state"
    state = StateDir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert running(path) == {}
    state.describe({"pid": 1, "actors": {"decode": 2}})
    assert running(path)["actors"] == {"decode": 2}
    (path / "nats.json").write_text("{}")
    state.close()
    assert running(path) == {}
    assert not (path / "nats.json").exists()


def test_a_second_holder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    first = StateDir(tmp_path)
    with pytest.raises(Misconfigured, match=rf"already runs.*{tmp_path}.*pid {os.getpid()}"):
        StateDir(tmp_path)
    first.close()
    StateDir(tmp_path).close()


def test_the_lock_of_a_killed_holder_is_free_and_its_leavings_are_gone(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from services.cli.state_dir import StateDir\n"
        "StateDir(Path(sys.argv[1])).describe({'pid': 7}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert running(tmp_path) == {"pid": 7}
    state = StateDir(tmp_path)
    assert running(tmp_path) == {}
    state.close()


def test_a_place_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match=r"file/state.*--state-dir"):
        StateDir(tmp_path / "file" / "state")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_somebody_else_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(Misconfigured, match="Permission denied"):
            StateDir(tmp_path / "state")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_summary_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "up.json").write_text(text)
    assert running(tmp_path) == {}
