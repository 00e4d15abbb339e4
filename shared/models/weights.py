"""Read-only mapping of safetensors files: every process of a host shares one copy in the page cache."""

from __future__ import annotations

import json
import mmap
import warnings
from pathlib import Path

import torch

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file as views of one read-only mapping; writing to one ends the process.

    Nothing is read until it is used. The mapping lives as long as any of the tensors.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = whole[begin:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
