"""The files that weights are mapped from: exact, aligned, and in memory once."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from shared.models.weight_file import TensorSpec, WeightReader, WeightWriter, file_bytes
from tests.support.processes import mappings, python


def test_weight_file_is_page_aligned_and_exact(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (3, 5)), TensorSpec("b", "BF16", (7,)), TensorSpec("empty", "U8", (0, 4))]
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    with WeightWriter(tmp_path / "w", specs) as writer:
        writer.tensor("b")[:] = range(7)
        writer.tensor("a")[:] = values
    assert (tmp_path / "w").stat().st_size == file_bytes(specs)
    assert (int.from_bytes((tmp_path / "w").read_bytes()[:8], "little") + 8) % mmap.PAGESIZE == 0
    reader = WeightReader(tmp_path / "w")
    assert list(reader.specs.values()) == specs
    assert np.array_equal(reader.tensor("a"), values)
    assert reader.tensor("b").tolist() == list(range(7))


MAP = """
import sys; from pathlib import Path; from shared.models.weights import map_tensors
tensors = map_tensors(Path(sys.argv[1]))
total = sum(float(tensor.float().sum()) for tensor in tensors.values())
print("mapped", flush=True); input()
"""


def test_two_workers_share_one_copy(tmp_path: Path) -> None:
    """Proportional set size: two processes that read all weights each account for half of them, and own none."""
    specs = [TensorSpec(f"t{index}", "BF16", (1024, 1024)) for index in range(16)]
    with WeightWriter(tmp_path / "weights.safetensors", specs) as writer:
        for spec in specs:
            writer.tensor(spec.name)[:] = 0x3F80
    path = str(tmp_path / "weights.safetensors")
    processes = [python(MAP, path) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "mapped\n"
        for process in processes:
            [usage] = [sizes for mapped, sizes in mappings(process.pid) if mapped == path]
            assert usage["Rss"] >= 32 << 20
            assert usage["Pss"] <= usage["Rss"] * 0.55
            assert usage["Private_Dirty"] == 0
    finally:
        for process in processes:
            process.communicate("\n", timeout=30)
