"""Files of scales that outlive a page: one number per layer for K and one for V. Pure: no torch.

safetensors (float tensors [layers]) or JSON (lists), with the names `k_scale` and `v_scale`; what else is known about
them is metadata of the safetensors file, or more names in the JSON object. `write` adds a digest over all that matters,
so that a file whose sides were swapped, or that was edited, is refused instead of being silently used. Files of other
tools have no digest and no model: they are taken at their word.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SIDES = ("k_scale", "v_scale")
FP32_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


class BadScales(ValueError):
    """A scale file that must not be used; the text names the file, the side and the layer."""


@dataclass(frozen=True)
class ScaleFile:
    """Scales by layer, and what they were learned for. Empty text: the file does not say."""

    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]
    model: str = ""
    """Identity of the model's weights."""
    k_format: str = ""
    v_format: str = ""
    policy: str = ""
    tokens: int = 0
    """How many tokens they were learned from."""

    @property
    def content(self) -> str:
        """Hash of the numbers alone: pages written under other numbers mean something else."""
        return _hash(self)

    @property
    def digest(self) -> str:
        """Hash of the numbers and of what they are for."""
        return _hash(self, self.model, self.k_format, self.v_format)


_TEXTS = ("model", "k_format", "v_format", "policy")


def _hash(scales: ScaleFile, *more: str) -> str:
    found = hashlib.blake2b(digest_size=16, person=b"kvrelay.scales")
    for name in SIDES:
        values = getattr(scales, name)
        found.update(name.encode() + struct.pack(f"<{len(values)}f", *values))
    for text in more:
        found.update(b"\0" + text.encode())
    return found.hexdigest()


def write(path: Path, scales: ScaleFile) -> None:
    """Puts the whole file in place at once. The suffix chooses the kind: .json, anything else is safetensors."""
    known = {name: getattr(scales, name) for name in _TEXTS} | {"tokens": str(scales.tokens), "digest": scales.digest}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".json":
            sides = {name: list(getattr(scales, name)) for name in SIDES}
            temporary.write_text(json.dumps({**sides, **known}, indent=1) + "\n")
        else:
            import numpy as np
            from safetensors.numpy import save_file

            tensors = {name: np.array(getattr(scales, name), dtype=np.float32) for name in SIDES}
            save_file(tensors, temporary, metadata=known)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, layers: int, model: str = "", k_format: str = "", v_format: str = "") -> ScaleFile:
    """The scales of a file for a model of `layers` layers. Raises BadScales for whatever speaks against using them.

    `model`, `k_format` and `v_format` are what they are wanted for; a file that names others is refused.
    """
    content, digest = _read(path)
    for name in SIDES:
        if name not in content:
            raise BadScales(f"{path}: {name} is missing")
        values = content[name]
        if len(values) != layers:
            raise BadScales(f"{path}: {name} has {len(values)} layers, the model has {layers}")
        for layer, value in enumerate(values):
            if not (math.isfinite(value) and 0 < value < FP32_MAX):
                raise BadScales(f"{path}: {name} of layer {layer} is {value}; it must be positive and finite")
    found = ScaleFile(**content)
    if digest is not None and digest != found.digest:
        swapped = replace(found, k_scale=found.v_scale, v_scale=found.k_scale).digest == digest
        why = "k_scale and v_scale are swapped" if swapped else "it was changed after it was calibrated"
        raise BadScales(f"{path}: {why}; run `kvrelay calibrate` again")
    if found.model and model and found.model != model:
        raise BadScales(f"{path}: it was calibrated for another model ({found.model[:12]} instead of {model[:12]})")
    for side, theirs, ours in (("K", found.k_format, k_format), ("V", found.v_format, v_format)):
        if theirs and ours and theirs != ours:
            raise BadScales(f"{path}: its {side} scales are for {theirs}, not for {ours}; calibrate for that format")
    return found


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """The fields of `ScaleFile` that are there, and the digest if there is one."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise BadScales(f"{path}: is no file")
        if path.suffix == ".json":
            raw = json.loads(path.read_text())
            numbers = {name: raw[name] for name in SIDES if name in raw}
            notes = raw
        else:
            from safetensors import safe_open

            with safe_open(path, framework="np") as file:
                present = set(file.keys())
                numbers = {name: file.get_tensor(name).flatten().tolist() for name in SIDES if name in present}
                notes = file.metadata() or {}
        content: dict[str, Any] = {name: tuple(_fp32(x) for x in values) for name, values in numbers.items()}
        content |= {name: str(notes[name]) for name in _TEXTS if name in notes}
        content["tokens"] = int(notes.get("tokens", 0))
        digest = notes.get("digest")
    except BadScales:
        raise
    except OSError as error:
        raise BadScales(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        text = f"{path}: is neither a JSON nor a safetensors file of k_scale and v_scale: {error}"
        raise BadScales(text) from error
    return content, None if digest is None else str(digest)


def _fp32(value: Any) -> float:
    """The number a kernel will see. NaN and infinity pass: `read` names them."""
    number = float(value)
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return math.inf
