"""What is on the wire: small messages, handles, and never a tensor."""

from __future__ import annotations

from pathlib import Path

import msgpack
from nats.aio.msg import Msg

from tests.e2e.pipeline import collect, pipeline

LIMIT = 64 * 1024


async def test_a_long_prompt_moves_handles_only(tmp_path: Path) -> None:
    options = ("--num-blocks-override", "700", "--prefill-pool", "cpu0", "--decode-pool", "cpu1")
    seen: list[tuple[str, int]] = []
    blobs: list[tuple[str, str, int]] = []

    async def listen(message: Msg) -> None:
        headers = sum(len(key) + len(value) + 4 for key, value in (message.headers or {}).items())
        seen.append((message.subject, len(message.data) + headers))
        if message.data and not message.subject.startswith(("$SRV", "_INBOX.admin")):
            blobs.extend(
                (message.subject, path, size)
                for path, size in byte_fields(msgpack.unpackb(message.data, strict_map_key=False))
            )

    with pipeline(tmp_path / "state", *options) as running:
        async with running.nats("admin") as spy, running.nats() as client:
            await spy.subscribe(">", cb=listen)
            await spy.flush()
            answer = await collect(
                client,
                {"token_ids": [7 + n % 4000 for n in range(4096)], "max_tokens": 20, "sampling": {"temperature": 0.0}},
            )
            await spy.flush()
    assert len(answer["token_ids"]) == 20 or answer["finish_reason"] == "stop"
    subjects = {subject for subject, _ in seen}
    for needed in ("prefill.run", "block_manager.acquire", "decode.start", "block_manager.adopt", "offload.copy"):
        assert f"kvrelay.{needed}" in subjects, f"the listener did not see {needed}: it would not see a tensor either"
    assert max(size for _, size in seen) <= LIMIT, max(seen, key=lambda one: one[1])
    one_token_of_kv = 23_040
    for subject, path, size in blobs:
        packed = path.endswith((".tokens", ".indices", ".generations", "keys"))
        assert packed or size < 256, f"{subject} carries {size} bytes in {path}"
        assert size <= 4 * 4097, f"{subject} carries {size} bytes in {path}; KV of one token is {one_token_of_kv}"


def byte_fields(value: object, path: str = "") -> list[tuple[str, int]]:
    """Every binary field of a message with its path and size."""
    if isinstance(value, bytes):
        return [(path, len(value))]
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in byte_fields(inner, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for inner in value for found in byte_fields(inner, f"{path}[]")]
    return []
