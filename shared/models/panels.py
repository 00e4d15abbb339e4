"""The file of packed weights beside a converted model: written once, mapped by every worker of the host."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from kernels.cpu import packing
from kernels.cpu.linear import PackedLinear
from shared.errors import Misconfigured
from shared.models.config import ModelConfig
from shared.models.files import ModelFiles
from shared.models.weights import map_tensors

LAYOUT = "panels1"
"""Goes up when `kernels.cpu.packing` changes the bytes."""
ALIGN = 64


def packable(config: ModelConfig) -> bool:
    """Whether the panels can hold this model: they take inputs in groups of 32."""
    return not any(n % packing.GROUP for n in (config.hidden_size, config.ffn_size, config.q_rows))


def map_panels(files: ModelFiles) -> dict[str, PackedLinear]:
    """Every matrix of the model by its weight name, packed. Writes the file first if it is not there.

    4- and 8-bit codes of the source are kept as they are; other matrices are packed in the compute dtype.
    """
    path = files.directory / f"packed-{LAYOUT}.safetensors"
    dense = map_tensors(files.weights)
    codes = map_tensors(files.packed) if files.packed else {}
    names = _names(files.config)
    kinds = {name: _kind(name, dense, codes) for name in names}
    shapes = {name: _shape(dense[name]) for name in names}
    if not path.exists():
        _write(path, names, kinds, dense, codes)
    tensors = map_tensors(path)
    return {
        name: PackedLinear(kinds[name], *shapes[name], tensors[name], _bias(name, dense), name.endswith("gate_up"))
        for name in names
    }


def _names(config: ModelConfig) -> list[str]:
    layers = [f"layers.{i}.{part}" for i in range(config.layers) for part in ("qkv", "o", "gate_up", "down")]
    return [*layers, "embed" if config.tie_embeddings else "head"]


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    out, columns = weight.shape
    return out, columns


def _kind(name: str, dense: dict[str, torch.Tensor], codes: dict[str, torch.Tensor]) -> int:
    if f"{name}.q4" in codes:
        return packing.Q4
    if f"{name}.q8" in codes:
        return packing.Q8
    return packing.BF16 if dense[name].dtype == torch.bfloat16 else packing.F32


def _bias(name: str, dense: dict[str, torch.Tensor]) -> torch.Tensor | None:
    bias = dense.get(f"{name}_bias")
    return None if bias is None else bias.float()


def _pack(name: str, kind: int, dense: dict[str, torch.Tensor], codes: dict[str, torch.Tensor]) -> torch.Tensor:
    gated = name.endswith("gate_up")
    if kind == packing.Q4:
        return packing.pack_q4(codes[f"{name}.q4"], codes[f"{name}.d"], codes[f"{name}.m"], gated)
    if kind == packing.Q8:
        return packing.pack_q8(codes[f"{name}.q8"], codes[f"{name}.d"], gated)
    return packing.pack_dense(dense[name], gated)


def _header(names: list[str], kinds: dict[str, int], dense: dict[str, torch.Tensor]) -> bytes:
    entries: dict[str, object] = {}
    offset = 0
    for name in names:
        shape = packing.packed_shape(kinds[name], *_shape(dense[name]), name.endswith("gate_up"))
        entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [offset, offset + shape[0] * shape[1]]}
        offset += shape[0] * shape[1]
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _write(
    path: Path, names: list[str], kinds: dict[str, int], dense: dict[str, torch.Tensor], codes: dict[str, torch.Tensor]
) -> None:
    """One process writes, others wait; the file appears whole. Misconfigured says what the disk refused."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            with partial.open("wb") as file:
                for part in _parts(names, kinds, dense, codes):
                    file.write(part)
            partial.replace(path)
    except OSError as error:
        raise Misconfigured(f"cannot write packed weights to {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _parts(
    names: list[str], kinds: dict[str, int], dense: dict[str, torch.Tensor], codes: dict[str, torch.Tensor]
) -> Iterator[bytes | memoryview]:
    yield _header(names, kinds, dense)
    for name in names:
        yield memoryview(_pack(name, kinds[name], dense, codes).numpy())
