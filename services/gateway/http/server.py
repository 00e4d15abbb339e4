"""Runs an ASGI application on the loop that is already running, on a port that is bound before anything is promised."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from shared.errors import Misconfigured

KEEP_ALIVE_S = 75
BACKLOG = 1024


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the actor."""
        yield


class HttpServer:
    """`bind`, then `serve` as a background task, then `stop`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def port(self) -> int:
        """The port that is listened on, also if 0 (any free one) was asked for."""
        return int(self._socket.getsockname()[1]) if self._socket is not None else self._port

    def bind(self) -> None:
        """Takes the port. Raises Misconfigured if it is taken, forbidden, or the host is not of this machine."""
        where = f"http_host {self._host}, http_port {self._port}"
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise Misconfigured(f"{where}: the port is taken; choose another one with --http-port") from None
            raise Misconfigured(f"{where}: cannot listen there: {error.strerror or error}") from None

    async def serve(self) -> None:
        """Serves until `stop`; raises what else ends it. Cancelling this does not: requests must have their answers."""
        if self._socket is None:
            raise RuntimeError("bind before serve")
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """Answers what is being answered, then closes. Returns when the port is free."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving])
        if self._socket is not None:
            self._socket.close()
