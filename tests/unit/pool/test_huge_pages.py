"""Memory of pools in huge pages: aligned, zeroed, let go with the last array, and optional."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.pool import huge_pages
from shared.pool.huge_pages import HUGE

SIZE = 5 * HUGE + 4096
RANGE = re.compile("[0-9a-f]+-[0-9a-f]+ ")


@pytest.fixture(params=["tmpfs", "disk"])
def descriptor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """An empty file of SIZE bytes where huge pages may be had, and where they may not."""
    if request.param == "tmpfs":
        found = os.memfd_create("huge-pages-test")
    else:
        found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.ftruncate(found, SIZE)
    yield found
    os.close(found)


def mapped(address: int) -> list[str]:
    """What /proc/self/smaps says of the mapping that holds the address."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if RANGE.match(line)]
    for i, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        first, last = (int(part, 16) for part in lines[i].split()[0].split("-"))
        if first <= address < last:
            return lines[i:end]
    return []


def test_a_mapping_is_aligned_shared_and_goes_with_its_last_array(descriptor: int) -> None:
    whole = huge_pages.map_file(descriptor, SIZE)
    other = huge_pages.map_file(descriptor, SIZE)
    assert whole.shape == (SIZE,) and whole.dtype == np.uint8 and whole.flags.writeable
    assert whole.ctypes.data % HUGE == 0 and other.ctypes.data % HUGE == 0
    whole[[0, SIZE - 1]] = 3, 4
    assert other[0] == 3 and os.pread(descriptor, 1, SIZE - 1) == b"\x04"
    address, view = whole.ctypes.data, whole[HUGE:].view("<u4")
    del whole
    gc.collect()
    assert mapped(address) and not view[:16].any()
    del view
    gc.collect()
    assert not mapped(address)
    assert other[SIZE - 1] == 4


def test_what_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    (tmp_path / "file").write_bytes(bytes(4096))
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError, match="denied") as caught:
        huge_pages.map_file(read_only, 4096)
    os.close(read_only)
    assert caught.value.errno == errno.EACCES
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1, "room that was set aside is given back"


def test_filling_changes_nothing_but_the_pages(descriptor: int) -> None:
    huge_pages.fill(descriptor, SIZE)
    assert os.fstat(descriptor).st_size == SIZE
    os.posix_fallocate(descriptor, 0, SIZE)
    assert not huge_pages.map_file(descriptor, SIZE).any()


def test_tmpfs_is_filled_with_huge_pages_where_linux_can() -> None:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (6, 1) or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this Linux cannot collapse shared memory")
    found = os.memfd_create("huge-pages-test")
    os.ftruncate(found, SIZE)
    huge_pages.fill(found, SIZE)
    filled = os.fstat(found).st_blocks * 512
    whole = huge_pages.map_file(found, SIZE)
    os.close(found)
    assert not whole.any()
    shown = dict(line.split(":") for line in mapped(whole.ctypes.data)[1:] if ":" in line)
    if filled < 5 * HUGE:
        pytest.skip("no free huge pages")
    assert int(shown["ShmemPmdMapped"].split()[0]) * 1024 == 5 * HUGE


def test_a_machine_short_of_huge_pages_gets_ordinary_ones_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "PATIENCE_S", -1.0)
    found = os.memfd_create("huge-pages-test")
    os.ftruncate(found, SIZE)
    huge_pages.fill(found, SIZE)
    assert os.fstat(found).st_blocks == 0
    os.close(found)
