"""The load generator's client against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h11
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infra.bench import http_load
from infra.bench.http_load import Scenario
from services.gateway.http.server import HttpServer


@asynccontextmanager
async def serving(answer: Callable[[Request], Awaitable[Response]]) -> AsyncIterator[str]:
    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    server = HttpServer(app, "127.0.0.1", 0)
    server.bind()
    task = asyncio.create_task(server.serve())
    try:
        yield f"http://127.0.0.1:{server.port}/v1"
    finally:
        await server.stop()
        await task


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def test_every_event_has_its_own_moment() -> None:
    asked = []

    async def answer(request: Request) -> Response:
        asked.append(await request.json())
        tokens = asked[-1]["max_tokens"]

        async def events() -> AsyncIterator[bytes]:
            for _ in range(tokens):
                yield event(choices=[{"text": "a"}])
                await asyncio.sleep(0.02)
            yield event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": tokens}) + b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async with serving(answer) as url:
        figures = await http_load.run(url, "m", Scenario("x", 2, 5, 6), {"ignore_eos": True}, seed=1)
    assert (figures.prompt_tokens, figures.completion_tokens) == (10, 12)
    assert [body["max_tokens"] for body in asked] == [1, 1, 6, 6]
    fresh, cached = ({body["prompt"] for body in asked[at : at + 2]} for at in (0, 2))
    assert fresh == cached and len(fresh) == 2 and asked[0]["ignore_eos"]
    assert 0 < figures.decode_tok_s < 2 * 2 / 0.02  # far from what reading all events at the end would give


async def test_a_refusal_is_quoted() -> None:
    async def answer(request: Request) -> Response:
        return JSONResponse({"error": "no such model"}, 404)

    async with serving(answer) as url:
        with pytest.raises(RuntimeError, match=r"404.*no such model"):
            await http_load.run(url, "m", Scenario("x", 1, 5, 6), {}, seed=1)


async def test_an_answer_that_breaks_off_is_an_error() -> None:
    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:")
        writer.close()

    server = await asyncio.start_server(cut_off, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(h11.RemoteProtocolError):
            await http_load.run(f"http://127.0.0.1:{port}/v1", "m", Scenario("x", 1, 5, 6), {}, seed=1)
