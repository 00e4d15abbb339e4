"""A shared prefix is computed once, and never across salts."""

from __future__ import annotations

from tests.e2e.pipeline import Pipeline, collect, stream

PREFIX = list(range(1000, 2000))


def body(tail: list[int], salt: str) -> dict[str, object]:
    return {"token_ids": PREFIX + tail, "max_tokens": 4, "sampling": {"temperature": 0.0}, "cache_salt": salt}


async def test_second_request_finds_the_prefix(fp32: Pipeline) -> None:
    async with fp32.nats() as client:
        first = await collect(client, body([5, 6, 7], "shared"))
        second = await collect(client, body([8, 9, 10, 11], "shared"))
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] >= 992
    assert second["timings"]["compute_s"] < first["timings"]["compute_s"]


async def test_same_prompt_three_times_answers_the_same(fp32: Pipeline) -> None:
    async with fp32.nats() as client:
        for length in (1, 15, 16, 17, 32, 33):
            prompt = {
                "token_ids": PREFIX[:length],
                "max_tokens": 12,
                "sampling": {"temperature": 0.0},
                "cache_salt": f"thrice-{length}",
            }
            runs = [await collect(client, prompt) for _ in range(3)]
            assert runs[0]["token_ids"] == runs[1]["token_ids"] == runs[2]["token_ids"], length
            # at least one token is always computed
            assert runs[1]["usage"]["cached_tokens"] == (length - 1) // 16 * 16


async def test_another_salt_never_hits(fp32: Pipeline) -> None:
    async with fp32.nats() as client:
        await collect(client, body([5], "tenant-a"))
        other = await collect(client, body([5], "tenant-b"))
    assert other["usage"]["cached_tokens"] == 0


async def test_how_much_was_cached_changes_no_bit_of_an_answer(bf16: Pipeline) -> None:
    """Whatever is left to compute, a single token included, is computed as a whole prompt would be."""
    async with bf16.nats() as client:
        for length in (17, 18, 20, 24, 32, 33, 257, 519):
            prompt = {
                "token_ids": PREFIX[:length],
                "max_tokens": 6,
                "sampling": {"temperature": 0.0, "logprobs": 3},
                "cache_salt": f"bits-{length}",
            }
            cold, warm = [[event async for event in stream(client, prompt)] for _ in range(2)]
            assert warm[-1]["usage"]["cached_tokens"] == (length - 1) // 16 * 16
            likely = [[each for event in events for each in event.get("logprobs") or ()] for events in (cold, warm)]
            assert len(likely[0]) == 6
            assert likely[0] == likely[1], length
