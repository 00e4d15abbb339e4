"""`kvrelay generate`: one request over NATS, as any client would send it."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import console, state_dir
from services.cli.application import application
from services.cli.connection import JsonOption, NamespaceOption, NatsUrlOption, StateDirOption, Where, connected, run
from services.cli.prompts import read_text
from shared.errors import Unavailable

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.messages import Generate

app = application()
NO_LIMIT_S = 86_400.0
RESTART_LIMIT_S = 10.0
RETRY_S = 0.1


class Interrupted(Unavailable):
    """The answer broke off after some of it was shown: trying again would show that part twice."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from stdin.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message in front of the prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(min=0)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    cache_salt: Annotated[str | None, typer.Option(help="Share cached prefixes only within this salt.")] = None,
    priority: Annotated[int, typer.Option(help="Lower is served first.")] = 0,
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Give up after this many seconds.")] = None,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Show the text as it comes.")] = None,
    as_json: JsonOption = False,
    state: StateDirOption = None,
    nats_url: NatsUrlOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Ask the running pipeline and print what the model says."""
    text = read_text("-") if prompt == "-" else prompt
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    if raw and system is not None:
        raise typer.BadParameter("a system message needs the chat template; leave out --raw", param_hint="--system")
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
    }
    turns = [{"role": "system", "content": system}] if system is not None else []
    request = {
        "prompt": text if raw else None,
        "messages": None if raw else [*turns, {"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stop": stop or [],
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "priority": priority,
        "cache_salt": cache_salt,
        "timeout_s": timeout,
    }
    try:
        json.dumps(request, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("a text on the command line is not valid UTF-8") from None
    show = (stream if stream is not None else not as_json) and not as_json
    answer = run(_ask(request, stream is not False, show, Where(state, nats_url, namespace)))
    if as_json:
        console.print_json(answer)
    elif not show:
        _write(answer["text"] + "\n")
    else:
        _write("\n")
    if not as_json and sys.stderr.isatty():
        console.err().print(_summary(answer), style="dim", highlight=False)


async def _ask(request: dict[str, Any], stream: bool, show: bool, where: Where) -> dict[str, Any]:
    """The whole answer; with `show`, its text is printed as it comes.

    A gateway that is just being restarted is waited for, if this pipeline's supervisor is there to do it.
    """
    settings = where.settings()
    supervised = settings.nats_url is None and bool(state_dir.running(settings.state_dir))
    loop = asyncio.get_running_loop()
    give_up = loop.time() + (RESTART_LIMIT_S if supervised else 0.0)
    async with connected("client", where) as bus:
        while True:
            try:
                return await _once(bus, request, stream, show)
            except Unavailable as error:
                if isinstance(error, Interrupted) or loop.time() > give_up:
                    raise
                await asyncio.sleep(RETRY_S)


async def _once(bus: Bus, request: dict[str, Any], stream: bool, show: bool) -> dict[str, Any]:
    """One attempt under a request id of its own. When it is cancelled, the gateway is told."""
    from pydantic import ValidationError

    from shared.errors import KvrelayError
    from shared.messages import Cancel, CancelResult, Generate, Generated

    request_id = f"cli-{uuid.uuid4().hex[:16]}"
    try:
        message = Generate.model_validate({**request, "request_id": request_id, "stream": stream})
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    try:
        if stream:
            return await _collect(bus, message, show)
        limit_s = message.timeout_s or NO_LIMIT_S
        whole = await bus.request("gateway.generate", message, Generated, timeout_s=limit_s, watched=True)
        return whole.model_dump(exclude_none=True)
    except asyncio.CancelledError:
        try:
            await bus.request("gateway.cancel", Cancel(request_id=request_id), CancelResult, timeout_s=2)
        except KvrelayError as error:
            console.complain(f"the request may still be running: {error.text}")
        raise


async def _collect(bus: Bus, message: Generate, show: bool) -> dict[str, Any]:
    """The events of a stream as one answer. Raises Interrupted if it breaks off after its beginning."""
    from shared.messages import Generated

    text: list[str] = []
    token_ids: list[int] = []
    last: Generated | None = None
    try:
        async with aclosing(bus.stream("gateway.generate", message, Generated)) as events:
            async for event in events:
                text.append(event.text)
                token_ids += event.token_ids
                last = event
                if show:
                    _write(event.text)
    except Unavailable as error:
        if last is None:
            raise
        raise Interrupted(error.text) from None
    if last is None or last.finish_reason is None:
        raise Interrupted("the stream ended before the answer did")
    return {**last.model_dump(exclude_none=True), "text": "".join(text), "token_ids": token_ids}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(answer: dict[str, Any]) -> str:
    usage, timings = answer.get("usage", {}), answer.get("timings", {})
    return " · ".join(
        [
            f"{usage.get('completion_tokens', len(answer['token_ids']))} tokens ({answer.get('finish_reason')})",
            f"{usage.get('cached_tokens', 0)} of {usage.get('prompt_tokens', 0)} prompt tokens cached",
            f"first after {1000 * timings.get('ttft_s', 0):.0f} ms",
            f"{timings.get('tokens_per_s', 0):.0f} tokens/s",
            f"trace {answer['trace_id']}",
        ]
    )
