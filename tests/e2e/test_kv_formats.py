"""Quantised caches in a whole pipeline: the setting reaches the pool and both workers, repeats are repeats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.pipeline import RUN_LIMIT_S, Pipeline, collect, pipeline

PROMPT = "In 1969, the first human being walked on the Moon. The capital of France is"
NEW = 40
OPTIONS = ("--num-blocks-override", "256", "--max-num-seqs", "4")


async def greedy(running: Pipeline, salt: str) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "ignore_eos": True}
    async with running.nats() as client:
        body = {"prompt": PROMPT, "max_tokens": NEW, "sampling": sampling, "cache_salt": salt}
        return await collect(client, body)


async def check(running: Pipeline, k_format: str, v_format: str) -> dict[str, Any]:
    """Runs a prompt fresh, from the cache and under another salt; returns the pool's numbers."""
    first, repeat, other = [await greedy(running, salt) for salt in ("a", "a", "b")]
    assert " Paris" in first["text"], first["text"]
    assert first["token_ids"] == repeat["token_ids"] == other["token_ids"]
    assert repeat["usage"]["cached_tokens"] > 0 == other["usage"]["cached_tokens"]
    found = running.stats()
    pool = found["pools"]["cpu0"]
    assert (pool["k_format"], pool["v_format"]) == (k_format, v_format)
    assert pool["bytes_per_token"] == pool["page_bytes"] / pool["block_size"] < 23_040
    shown = running.cli("stats").stdout
    assert "bytes per token" in shown and ("--block-size 32" in shown) == (pool["scale_share"] > 0.1)
    return found


@pytest.mark.parametrize(
    ("flags", "k_format", "v_format"),
    [
        (("--kv-cache-dtype", "quantised"), "int8_channel", "int8_channel"),
        (("--kv-cache-dtype", "k16v4", "--kv-cache-dtype-skip-layers", "first:2,last:2"), "bf16", "int4"),
    ],
    ids=["int8_channel", "k16v4-skip"],
)
async def test_formats_without_files(tmp_path: Path, flags: tuple[str, ...], k_format: str, v_format: str) -> None:
    with pipeline(tmp_path, *OPTIONS, *flags) as running:
        await check(running, k_format, v_format)


async def test_calibrated_scales_reach_both_workers_and_are_watched(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    command = [sys.executable, "-m", "services.cli", "calibrate", "--prompts", "-", "--out", str(path)]
    formats = ("--k-cache-dtype", "int8_per_tensor", "--v-cache-dtype", "fp8_per_tensor")
    subprocess.run(
        [*command, *formats], input=f"{PROMPT}\n" * 3, text=True, check=True, timeout=RUN_LIMIT_S, env=os.environ
    )
    flags = (*OPTIONS, *formats, "--kv-scales-path", str(path))
    with pipeline(tmp_path / "state", *flags) as running:
        found = await check(running, "int8_per_tensor", "fp8_e4m3_per_tensor")
        details = {actor["name"]: actor["details"] for actor in found["actors"]}
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(f"{running.url}/metrics", timeout=5)).text
    for worker in ("prefill", "decode"):
        assert 0 <= details[worker]["clipped_fraction"] < 0.01
    assert 'name="clipped_fraction"' in metrics
