"""Where a model and its memory are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shared.errors import Misconfigured
from shared.models import runtime
from tests.support.pools import tiny_layout


def test_a_pool_on_a_gpu_of_another_number_is_refused() -> None:
    """torch would copy it to the GPU of the name, and the worker would compute beside the pool."""
    pool = cast(Any, SimpleNamespace(name="cuda0-decode", pages=SimpleNamespace(device_index=1)))
    with pytest.raises(Misconfigured, match=r"number 1 in this process.*CUDA_VISIBLE_DEVICES"):
        runtime.Memory.of(pool, tiny_layout())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_torch_cannot_use_is_named() -> None:
    with pytest.raises(Misconfigured, match=r"torch cannot use cuda:0.*CUDA build"):
        runtime.load(cast(Any, None), "float32", "auto", 1, "cuda:0")
