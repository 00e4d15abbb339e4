"""Pools on a GPU, under a driver in C that keeps device memory in files: handles, epochs, geometry of processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shared import pool
from shared.errors import Misconfigured, Stale
from shared.messages import PoolDescription
from shared.pool import cuda_ipc
from tests.support import fake_cuda
from tests.support.pools import handles

CALLS = """
import sys, threading
from pathlib import Path
from shared.errors import Conflict, Misconfigured, Stale
from shared.messages import PoolDescription
from shared.pool import attach, create, cuda_ipc
from tests.support.pools import handles, tiny_layout

def describe(pool):
    return PoolDescription(pool=pool.name, kind="cuda_ipc", path=str(pool.path), epoch=pool.epoch, blocks=pool.blocks,
                           tails=pool.slots, layout=tiny_layout(), max_model_len=16)

def at(memory, row):
    return memory.pointer + row * memory.shape[1]
"""
OWNER = (
    CALLS
    + """
blocks = int(sys.argv[2])
pool = create("cuda1-decode", sys.argv[1], tiny_layout(), blocks, 2)
assert (pool.pages.shape, pool.tails.shape, pool.generations.shape) == ((blocks, 4096), (2, 1024), (blocks + 2,))
pool.device.write(at(pool.pages, 7), b"page seven")
pool.generations[7] = 3
print(describe(pool).model_dump_json(), flush=True)
sys.stdin.readline()
assert pool.device.read(at(pool.tails, 1), 4) == b"tail"
pool.close()
pool.close()
print("closed", flush=True)
sys.stdin.readline()
"""
)
READER = (
    CALLS
    + """
description = PoolDescription.model_validate_json(sys.argv[1])
pool = attach(description)
assert pool.device.index == 1 and pool.epoch == description.epoch
seen = []
thread = threading.Thread(target=lambda: seen.append(pool.device.read(at(pool.pages, 7), 10)))
thread.start(), thread.join()
assert seen == [b"page seven"]
table, tail = handles(pool, [7], 1)
pool.check(table, tail=tail)
for wrong, error in (({"epoch": description.epoch ^ 1}, Stale), ({"blocks": 9}, Conflict),
                     ({"layout": tiny_layout(8192)}, Conflict)):
    try:
        attach(description.model_copy(update=wrong))
    except error:
        continue
    raise AssertionError(wrong)
pool.device.write(at(pool.tails, 1), b"tail")
print("read", flush=True)
sys.stdin.readline()
try:
    pool.check(table)
except Stale:
    assert pool.device.read(at(pool.pages, 7), 10) == b"page seven"
    pool.close(), pool.close()
    print("stale", flush=True)
"""
)
REFUSED = (
    CALLS
    + """
for name, blocks, text in (("cuda5", 8, "2 visible"), ("cuda0", 20000, "num-blocks-override"), ("cpu0", 8, "cuda<N>")):
    try:
        cuda_ipc.create(name, sys.argv[1], tiny_layout(), blocks, 2)
    except Misconfigured as error:
        assert text in str(error), error
        continue
    raise AssertionError(name)
assert cuda_ipc.rooms(["cuda0"], sys.argv[1]) == {"cuda0": 32 << 20}
assert cuda_ipc.rooms(["cuda0-a", "cuda0-b", "cuda1"], sys.argv[1]) == {
    "cuda0-a": 16 << 20, "cuda0-b": 16 << 20, "cuda1": 32 << 20}
"""
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return fake_cuda.build(tmp_path)


def start(text: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments], env=environment, text=True, cwd=fake_cuda.ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_a_worker_reads_and_writes_what_the_block_manager_owns(environment: dict[str, str], tmp_path: Path) -> None:
    owner = start(OWNER, environment, str(tmp_path), "8")
    assert owner.stdin is not None and owner.stdout is not None
    reader = start(READER, environment, owner.stdout.readline().strip())
    assert reader.stdin is not None and reader.stdout is not None
    assert reader.stdout.readline() == "read\n"
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "closed\n"
    assert reader.communicate("\n", timeout=30)[0] == "stale\n"
    assert owner.communicate("\n", timeout=30) is not None
    assert (owner.returncode, reader.returncode) == (0, 0)


def test_a_dead_owner_makes_its_pool_stale_and_a_successor_does_not_wait_for_ever(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start(OWNER, environment, str(tmp_path), "10000")
    assert owner.stdout is not None
    description = PoolDescription.model_validate_json(owner.stdout.readline())
    with fake_cuda.loaded(tmp_path, monkeypatch):
        reader = pool.attach(description)
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
        with pytest.raises(Stale, match="is gone"):  # its record is still there, but nobody can be asked for the memory
            pool.attach(description)
        monkeypatch.setattr(cuda_ipc, "PATIENCE_S", 0.2)
        reader.check(*handles(reader, [3]))  # nobody has taken it over yet
        free = cuda_ipc.Device(1).memory().free
        assert cuda_ipc.rooms(["cuda1-decode"], tmp_path) == {"cuda1-decode": free // 2}  # it was not let go in time
        with pytest.raises(Stale):
            reader.check(*handles(reader, [3]))


def test_a_successor_is_as_large_as_its_predecessor(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start(OWNER, environment, str(tmp_path), "10000")
    assert owner.stdout is not None
    description = PoolDescription.model_validate_json(owner.stdout.readline())
    with fake_cuda.loaded(tmp_path, monkeypatch):
        reader = pool.attach(description)
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)

        def let_go() -> None:
            while reader.live_epoch() == reader.epoch:
                threading.Event().wait(0.01)
            reader.close()

        worker = threading.Thread(target=let_go)
        worker.start()
        assert cuda_ipc.rooms(["cuda1-decode"], tmp_path) == {"cuda1-decode": 4096 + 10000 * 4096}
        worker.join()


def test_what_cannot_be_is_refused_and_leaves_nothing_behind(environment: dict[str, str], tmp_path: Path) -> None:
    refused = start(REFUSED, environment, str(tmp_path))
    refused.communicate(timeout=30)
    assert refused.returncode == 0
    assert not list(tmp_path.glob("kvrelay-*"))


@pytest.mark.parametrize(
    ("name", "kind", "device"),
    [("cpu0", "shm", "cpu"), ("cuda0", "cuda_ipc", "cuda:0"), ("cuda12-decode", "cuda_ipc", "cuda:12"),
     ("cudax", "shm", "cpu"), ("cuda", "shm", "cpu")],
)  # fmt: skip
def test_names_say_where_a_pool_is(name: str, kind: str, device: str) -> None:
    assert (pool.kind_of(name), pool.device_of(name)) == (kind, device)


def test_without_a_driver_the_text_says_so(tmp_path: Path) -> None:
    try:
        cuda_ipc.rooms(["cuda0"], tmp_path)
    except Misconfigured as error:
        assert "NVIDIA driver" in str(error)
    else:
        pytest.skip("there is a GPU here")
