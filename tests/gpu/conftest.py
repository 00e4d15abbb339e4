"""These tests run Triton kernels: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set for the process."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the interpreter works on CPU tensors."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda", 0)
