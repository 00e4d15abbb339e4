"""Converts a source model into weights.safetensors (and packed.safetensors), a bounded piece of a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shared.errors import Misconfigured
from shared.models.architecture import Part, Target, targets
from shared.models.config import ModelConfig
from shared.models.gguf import PACKED_BLOCKS, GgufSource
from shared.models.identity import Progress
from shared.models.safetensors_folder import FolderSource
from shared.models.weight_file import TensorSpec, WeightWriter

Source = GgufSource | FolderSource

STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
PIECE = 4 << 20  # weights converted at once: 16 MiB in float32


def check(source: Source, config: ModelConfig) -> list[Target]:
    """The targets of `config`. Misconfigured names tensors that are missing, unknown, or of a wrong shape or kind."""
    wanted = targets(config)
    parts = [part for target in wanted for part in target.parts]
    present, expected = source.names(), {source.part_name(part) for part in parts}
    if missing := sorted(expected - present):
        raise Misconfigured(f"{source.path}: {_some(missing)} missing for {config.architecture!r}")
    if unknown := sorted(present - expected):
        raise Misconfigured(f"{source.path}: {_some(unknown)} unknown to {config.architecture!r}")
    for part in parts:
        name = source.part_name(part)
        if source.shape(name) != part.shape:
            raise Misconfigured(f"{source.path}: tensor {name!r} has shape {source.shape(name)}, expected {part.shape}")
    for part in {source.kind(source.part_name(part)): part for part in parts}.values():
        source.read(part, 0, 1)  # a kind that cannot be read is refused now, not after minutes of conversion
    return wanted


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"tensors {shown} are" if len(names) > 1 else f"tensor {shown} is"


def weight_specs(wanted: list[Target], dtype: str) -> list[TensorSpec]:
    """Layout of weights.safetensors; `dtype` is a key of `STORED`."""
    return [TensorSpec(target.name, STORED[dtype], target.shape) for target in wanted]


def packed_specs(source: Source, wanted: list[Target]) -> list[TensorSpec]:
    """Layout of packed.safetensors: codes and scales of targets that are 4-bit or 8-bit in blocks of 32.

    `<name>.q4` u8 [out, in/2] (low nibble: even input), `<name>.q8` i8 [out, in], `<name>.d` and `<name>.m` fp16
    [out, in/32]; a weight is d·q + m, or d·q for q8.
    """
    specs = []
    for target in wanted:
        kinds = {source.kind(source.part_name(part)) for part in target.parts}
        if kinds <= {"Q4_0", "Q4_1"}:
            out, columns = target.shape
            specs.append(TensorSpec(f"{target.name}.q4", "U8", (out, columns // 2)))
            specs += [TensorSpec(f"{target.name}.{side}", "F16", (out, columns // 32)) for side in "dm"]
        elif kinds == {"Q8_0"}:
            out, columns = target.shape
            specs.append(TensorSpec(f"{target.name}.q8", "I8", (out, columns)))
            specs.append(TensorSpec(f"{target.name}.d", "F16", (out, columns // 32)))
    return specs


def write_weights(path: Path, source: Source, wanted: list[Target], dtype: str, progress: Progress) -> None:
    """Fills weights.safetensors. Misconfigured for numbers that are not finite or that `dtype` cannot hold."""
    specs = weight_specs(wanted, dtype)
    total, done = sum(spec.nbytes for spec in specs), 0
    with WeightWriter(path, specs) as writer:
        for target in wanted:
            rows = writer.tensor(target.name)
            for part, start, stop, at in _pieces(target):
                values = source.read(part, start, stop)
                rows[at : at + stop - start] = _store(values, dtype, source, part)
                done += rows[at : at + stop - start].nbytes
                progress("converting weights", done, total)


def write_packed(path: Path, source: GgufSource, wanted: list[Target], progress: Progress) -> None:
    """Fills packed.safetensors with the codes and scales of `source`, bit for bit."""
    specs = packed_specs(source, wanted)
    names = {spec.name for spec in specs}
    total, done = sum(spec.nbytes for spec in specs), 0
    with WeightWriter(path, specs) as writer:
        for target in wanted:
            if f"{target.name}.d" not in names:
                continue
            for part, start, stop, at in _pieces(target):
                unpacked = unpack(source.blocks(part, start, stop), source.kind(part.gguf))
                for suffix, values in unpacked.items():
                    writer.tensor(f"{target.name}.{suffix}")[at : at + stop - start] = values
                    done += values.nbytes
                progress("keeping quantised weights", done, total)


def unpack(blocks: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """u8 [rows, blocks, bytes] of a GGUF type to the arrays of `packed_specs`, by suffix; exact, for -8·d is."""
    rows = blocks.shape[0]
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[..., 0]
    if kind == "Q8_0":
        return {"q8": np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(rows, -1), "d": scale}
    codes = blocks[:, :, PACKED_BLOCKS[kind] - 16 :]
    # Byte j of a block holds its elements j and j + 16.
    in_order = np.concatenate((codes & 0x0F, codes >> 4), axis=2).reshape(rows, -1)
    minimum = np.ascontiguousarray(blocks[:, :, 2:4]).view("<f2")[..., 0] if kind == "Q4_1" else scale * np.float16(-8)
    return {"q4": in_order[:, 0::2] | in_order[:, 1::2] << 4, "d": scale, "m": minimum}


def _pieces(target: Target) -> Iterator[tuple[Part, int, int, int]]:
    """(part, first row, end row, row in the target) so that a piece has at most `PIECE` weights."""
    at = 0
    for part in target.parts:
        step = max(1, PIECE // max(1, math.prod(part.shape[1:])))
        for start in range(0, part.shape[0], step):
            yield part, start, min(start + step, part.shape[0]), at + start
        at += part.shape[0]


def _store(values: np.ndarray, dtype: str, source: Source, part: Part) -> np.ndarray:
    if not np.isfinite(values).all():
        raise Misconfigured(f"{source.path}: tensor {source.part_name(part)!r} holds numbers that are not finite")
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return to_bfloat16(values)
    if np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise Misconfigured(f"{source.path}: tensor {source.part_name(part)!r} does not fit float16; use bfloat16")
    return values.astype(np.float16)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bf16 bits (u16) nearest to finite float32 `values`, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
