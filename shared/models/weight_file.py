"""Writing and reading safetensors files with numpy alone: conversion needs no torch and never holds a model in memory.

Format: u64 little-endian header length, JSON header, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from shared.errors import Misconfigured

ALIGN = 4096
HEADER_LIMIT = 100 << 20
# numpy has no bfloat16: its bits are handled as u16.
STORAGE: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize


def file_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the file that `WeightWriter` makes of `specs`."""
    return len(_header(specs)) + sum(spec.nbytes for spec in specs)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)  # the data starts on a page, so rows of 64 bytes stay aligned
    return struct.pack("<Q", len(text)) + text


class WeightWriter:
    """A new safetensors file whose tensors are filled in any order through mapped arrays.

    The space is reserved first, so a full disk is an OSError here and never a signal later.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._header = _header(specs)
        self._specs = {spec.name: spec for spec in specs}
        self._offsets: dict[str, int] = {}
        offset = len(self._header)
        for spec in specs:
            self._offsets[spec.name] = offset
            offset += spec.nbytes
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, offset)
            file.write(self._header)
        self._map = np.memmap(path, np.uint8, "r+")
        self.path = path

    def tensor(self, name: str) -> np.ndarray:
        """The writable array of tensor `name` in its storage type (bf16: u16 bits)."""
        spec, start = self._specs[name], self._offsets[name]
        return self._map[start : start + spec.nbytes].view(STORAGE[spec.dtype]).reshape(spec.shape)

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._map.flush()
        del self._map


class WeightReader:
    """Read-only view of a safetensors file; damage is Misconfigured with the file's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = np.memmap(path, np.uint8, "r")
        except ValueError as error:
            raise Misconfigured(f"{path}: the file is empty") from error
        header = self._parse()
        self.specs: dict[str, TensorSpec] = {}
        self._starts: dict[str, int] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry)

    def _parse(self) -> dict[str, object]:
        size = self._map.size
        length = int(self._map[:8].view("<u8")[0]) if size >= 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise Misconfigured(f"{self.path}: truncated or not a safetensors file")
        try:
            header = json.loads(self._map[8 : 8 + length].tobytes())
        except ValueError as error:
            raise Misconfigured(f"{self.path}: the safetensors header is damaged") from error
        if not isinstance(header, dict):
            raise Misconfigured(f"{self.path}: the safetensors header is damaged")
        self._data = 8 + length
        return header

    def _add(self, name: str, entry: object) -> None:
        try:
            dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])  # type: ignore[index]
            start, end = (self._data + int(offset) for offset in entry["data_offsets"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError) as error:
            raise Misconfigured(f"{self.path}: the header of tensor {name!r} is damaged") from error
        if dtype in STORAGE:
            spec = TensorSpec(name, dtype, shape)
            if not self._data <= start <= end <= self._map.size or end - start != spec.nbytes:
                raise Misconfigured(f"{self.path}: truncated or damaged; tensor {name!r} is not whole")
            self.specs[name], self._starts[name] = spec, start
        else:
            self.specs[name] = TensorSpec(name, str(dtype), shape)

    def tensor(self, name: str) -> np.ndarray:
        """The array of tensor `name` as stored (bf16: u16 bits). Misconfigured for types that models do not use."""
        spec = self.specs[name]
        if spec.dtype not in STORAGE:
            raise Misconfigured(f"{self.path}: tensor {name!r} has unsupported type {spec.dtype}")
        start = self._starts[name]
        return self._map[start : start + spec.nbytes].view(STORAGE[spec.dtype]).reshape(spec.shape)
