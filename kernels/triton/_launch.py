"""Where kernels run: in the interpreter or on a device, and how wide that device is."""

from __future__ import annotations

import os
from functools import cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 in the interpreter, so that work is not split for nothing."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
