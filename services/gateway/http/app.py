"""Routes of the HTTP door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.gateway.answers import Answers, Api, Pieces, error_body, status_of
from services.gateway.http.events import ClientGone, EventStream, until_gone
from services.gateway.http.stream import Chunks
from services.gateway.live import Live
from services.gateway.metrics import Metrics
from services.gateway.openai import ChatCompletionRequest, CompletionRequest, Refused, parse
from services.gateway.service import Service
from services.gateway.watch import Watch
from shared import headers, logs, telemetry
from shared.clock import Clock
from shared.errors import Cancelled, Internal, KvrelayError, NotFound, TooLarge
from shared.messages import Generate, ModelCard

MAX_BODY_BYTES = 2 << 20  # parsing holds up everybody: up to half a second at this size
SPAN = "gateway.generate"  # the same name by either door
_ATTRIBUTES = {telemetry.ACTOR: "gateway", telemetry.VERB: "generate"}
_log = logs.get()


@dataclass(frozen=True)
class Door:
    """What the routes need. `card` raises Unavailable until the model is known."""

    service: Service
    watch: Watch
    metrics: Metrics
    clock: Clock
    pieces: Pieces
    card: Callable[[], ModelCard]

    def app(self) -> Starlette:
        post, get = ["POST"], ["GET"]  # starlette answers HEAD wherever GET is
        routes = [
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{name:path}", self.model, methods=get),
            Route("/health", self.health, methods=get),
            Route("/metrics", self.scrape, methods=get),
        ]
        handlers: dict[Any, Any] = {KvrelayError: _refuse, HTTPException: _http_error, Exception: _fault}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def chat(self, request: Request) -> Response:
        asked = parse(await _body(request), ChatCompletionRequest)
        return await self._answer(request, "chat", asked.generate(), asked.usage_wanted)

    async def completions(self, request: Request) -> Response:
        asked = parse(await _body(request), CompletionRequest)
        return await self._answer(request, "completions", asked.generate(), asked.usage_wanted)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(self.card())]})

    async def model(self, request: Request) -> Response:
        name, card = request.path_params["name"], self.card()
        if name != card.name:
            raise NotFound(f"model: {name[:100]!r} is not served here; this pipeline serves {card.name!r}")
        return JSONResponse(_model(card))

    async def health(self, request: Request) -> Response:
        missing = self.watch.missing()
        status = "ok" if not missing else "unavailable"
        body = {"status": status, "missing": missing, "actors": self.watch.report(self.clock.monotonic())}
        return JSONResponse(body, 200 if not missing else 503)

    async def scrape(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type=self.metrics.content_type)

    async def _answer(self, request: Request, api: Api, generate: Generate, usage_wanted: bool) -> Response:
        """Serves one request below a root span of its own, which ends with the answer."""
        span, below = telemetry.start_request(SPAN, telemetry.extract(request.headers), _ATTRIBUTES)
        live: Live | None = None
        streaming = False
        error: BaseException | None = None

        def close(error: BaseException | None) -> None:
            if live is not None:
                self.service.abandon(live)
            telemetry.end(span, error)

        try:
            live = await self.service.open(generate, below, headers.timeout_s(request.headers))
            out = {"x-request-id": live.request.id, "kvrelay-trace-id": live.trace_id}
            answers = Answers(api, self.card().name, live.request.id, int(self.clock.wall()), self.pieces)
            if not generate.stream:
                answer = await until_gone(request.receive, self.service.whole(live))
                return JSONResponse(answers.whole(answer), headers=out)
            events = self.service.events(live)
            first = await until_gone(request.receive, anext(events))  # an error until here has a status of its own
            streaming = True
            return EventStream(Chunks(answers, first, events, usage_wanted, close), out)
        except ClientGone:
            error = Cancelled("the client is gone")
            return Response(status_code=499)
        except BaseException as problem:
            error = problem
            raise
        finally:
            if not streaming:
                close(error)


async def _body(request: Request) -> bytes:
    """The whole body; TooLarge past the limit, before it is all read."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise Refused(f"content-encoding: {encoding[:40]!r} is not supported; send the body as it is", None)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise TooLarge(f"the body is over the limit of {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise Cancelled("the client is gone") from None
    return bytes(body)


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": 0,
        "owned_by": "kvrelay",
        "max_model_len": card.context_length,
        "kvrelay": card.model_dump(),
    }


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, KvrelayError):
        raise error
    extra = {}
    if error.retryable:
        extra["retry-after"] = str(max(1, round(error.retry_after_s or 1)))
    return JSONResponse(error_body(error), status_of(error), extra)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    text = {404: f"there is no {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    refused = Refused(text.get(error.status_code, error.detail), None)
    return JSONResponse(error_body(refused), error.status_code, error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    _log.error("an HTTP request failed", path=request.url.path, exc_info=error)
    return JSONResponse(error_body(Internal("internal error; the log of the gateway has the details")), 500)
