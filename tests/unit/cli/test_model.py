"""The conversion that `kvrelay up` begins with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.cli.model import prepare
from shared.errors import Misconfigured
from tests.support.waiting import until


async def test_an_interrupted_conversion_leaves_no_weights_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path))
    converting = asyncio.create_task(prepare("smollm2-135m", "bfloat16"))
    await until(lambda: list(tmp_path.glob("models/.*/weights.safetensors")), 60)
    converting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await converting
    assert not [path for path in tmp_path.glob("models/**/*") if "safetensors" in path.name]
    assert not list(tmp_path.glob("models/.*"))


async def test_what_is_wrong_with_the_model_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"^model '.*no-such'.*known name") as refusal:
        await prepare(str(tmp_path / "no-such"), "bfloat16")
    assert "\n" not in str(refusal.value)
