"""Scales that outlive a page: one number per layer for K and one for V, in one object that writer and reader share.

A file holds `k_scale` and `v_scale`, each one positive number per layer: safetensors (fp32 tensors [layers]) or JSON
(lists). `save` adds a digest, so that a file whose sides were swapped or edited is refused, not silently used.

Policies: `max` is the largest magnitude ever seen; `smoothed_max` forgets old peaks, m = max(current, gamma * m), and
like `max` never lies below what it sees now, so that nothing clips while it is followed.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from kernels import formats
from kernels.formats._per_tensor import PerTensor
from kernels.layout import PageLayout

SIDES = ("k_scale", "v_scale")
POLICIES = ("max", "smoothed_max")


class BadScales(ValueError):
    """A scale file that must not be used; the text names the file, the side and the layer."""


def _digest(sides: dict[str, list[float]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in SIDES:
        digest.update(name.encode() + torch.tensor(sides[name], dtype=torch.float32).numpy().tobytes())
    return digest.hexdigest()


def save(path: Path, scales: Tensor) -> None:
    """Writes scales fp32 [layers, 2] (K, V) to `path`: .json or .safetensors."""
    sides = {name: scales[:, side].tolist() for side, name in enumerate(SIDES)}
    if path.suffix == ".json":
        path.write_text(json.dumps({**sides, "digest": _digest(sides)}, indent=1))
        return
    from safetensors.torch import save_file

    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in sides.items()}
    save_file(tensors, path, metadata={"digest": _digest(sides)})


def load(path: Path, layers: int) -> Tensor:
    """Scales fp32 [layers, 2] (K, V) of a file, for `scales=` of every op. Raises BadScales."""
    sides, digest = _read(path)
    for name in SIDES:
        if name not in sides:
            raise BadScales(f"{path}: {name} is missing")
        values = sides[name]
        if len(values) != layers:
            raise BadScales(f"{path}: {name} has {len(values)} layers, the model has {layers}")
        for layer, value in enumerate(values):
            if not (math.isfinite(value) and 0 < value < torch.finfo(torch.float32).max):
                raise BadScales(f"{path}: {name} of layer {layer} is {value}; it must be positive and finite")
    if digest is not None and digest != _digest(sides):
        swapped = dict(zip(SIDES, (sides[SIDES[1]], sides[SIDES[0]]), strict=True))
        why = "k_scale and v_scale are swapped" if digest == _digest(swapped) else "changed after it was calibrated"
        raise BadScales(f"{path}: {why}; run `kvrelay calibrate` again")
    return torch.tensor([sides[name] for name in SIDES], dtype=torch.float32).T.contiguous()


def _read(path: Path) -> tuple[dict[str, list[float]], str | None]:
    """The sides that are there, and the digest if there is one."""
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            found = {name: [float(x) for x in content[name]] for name in SIDES if name in content}
            return found, content.get("digest")
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            found = {name: file.get_tensor(name).float().flatten().tolist() for name in SIDES if name in known}
            return found, (file.metadata() or {}).get("digest")
    except OSError as error:
        raise BadScales(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        text = f"{path}: is neither a JSON nor a safetensors file of k_scale and v_scale: {error}"
        raise BadScales(text) from error


def top(format_name: str) -> float:
    """Largest code magnitude of a per-tensor format: its scale is the largest |x| divided by this."""
    found = formats.load(format_name)
    if not isinstance(found, PerTensor):
        raise ValueError(f"{format_name} keeps its scales in the page")
    return found.code.top


def clipped_fraction(x: Tensor, scale: float, format_name: str) -> float:
    """Share of elements of x that saturate under `scale`."""
    return float((x.float().abs() > scale * top(format_name)).float().mean())


class Calibrator:
    """Learns scales from activations. Batches that are all zero (padding, warm-up) teach nothing."""

    def __init__(self, layout: PageLayout, policy: str = "max", gamma: float = 0.99) -> None:
        if policy not in POLICIES:
            raise ValueError(f"scale policy must be {' or '.join(POLICIES)}, not {policy!r}")
        if not 0 < gamma < 1:
            raise ValueError(f"gamma must lie between 0 and 1, not {gamma}")
        sides = (layout.k_format, layout.v_format)
        self._tops = torch.tensor([top(name) if formats.load(name).outlives_page else 1.0 for name in sides])
        self._keep = gamma if policy == "smoothed_max" else 1.0
        self._peaks = torch.zeros(layout.layers, 2)

    def observe(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Takes in one batch of keys and values of a layer, of any shape. Raises ValueError for NaN or infinity."""
        for side, x in enumerate((k, v)):
            current = float(x.float().abs().max()) if x.numel() else 0.0
            if not math.isfinite(current):
                raise ValueError(f"{SIDES[side]} of layer {layer}: activations are not finite")
            if current > 0:
                self._peaks[layer, side] = max(current, self._keep * float(self._peaks[layer, side]))

    def scales(self) -> Tensor:
        """fp32 [layers, 2], rounded up so that the peak itself does not clip. ValueError if a layer saw nothing."""
        for layer, side in (self._peaks == 0).nonzero().tolist():
            raise ValueError(f"{SIDES[side]} of layer {layer} saw only zeros; calibrate on real prompts")
        exact = self._peaks / self._tops
        short = exact * self._tops < self._peaks
        return torch.where(short, torch.nextafter(exact, torch.tensor(math.inf)), exact)
