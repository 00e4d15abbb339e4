"""What contract tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """The reference works on small tensors; torch's barriers would cost more than its arithmetic."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The native kernels for one instruction set after the other."""
    from kernels.cpu import build

    flags = build._cpu()
    if (request.param == "avx512" and "avx512bw" not in flags) or (request.param == "avx2" and "avx2" not in flags):
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setenv("KVRELAY_CPU_ISA", request.param)
    build.load.cache_clear()
    yield
    build.load.cache_clear()
