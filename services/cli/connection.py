"""From the command line to a running pipeline: by its state directory, or by a NATS URL with credentials in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import typer

from services.cli.state_dir import running
from shared.errors import Misconfigured

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.settings import CommonSettings

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0

StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", help="State directory of the pipeline.", show_default=False)
]
NatsUrlOption = Annotated[
    str | None,
    typer.Option(
        "--nats-url", help="nats://user:password@host:port, instead of a state directory.", show_default=False
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="First word of the pipeline's subjects.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, for programs.")]


class Where(NamedTuple):
    """The options that say which pipeline is meant; None is not given."""

    state_dir: Path | None = None
    nats_url: str | None = None
    namespace: str | None = None

    def settings(self) -> CommonSettings:
        """Completed from the environment and kvrelay.toml. A state directory given by flag beats a URL that was not."""
        from shared.settings import CommonSettings, load

        environ = dict(os.environ)
        if self.state_dir is not None and self.nats_url is None:
            environ.pop("KVRELAY_NATS_URL", None)
        return with_login(load(CommonSettings, self._asdict(), environ))


def with_login(settings: Any) -> Any:
    """The same settings with the credentials taken out of `nats_url` into `nats_user` and `nats_password`."""
    return settings.model_copy(update=login_in(settings.nats_url))


def login_in(nats_url: str | None) -> dict[str, Any]:
    """The settings that a NATS URL stands for: `nats_url` without credentials, and, if it has any, the user and the
    password. Raises Misconfigured if it is none."""
    from pydantic import SecretStr

    if nats_url is None:
        return {}
    parts = urlsplit(nats_url if "://" in nats_url else f"nats://{nats_url}")
    try:
        host, port = parts.hostname, parts.port or 4222
    except ValueError:
        host, port = None, 0
    if not host:
        raise Misconfigured("the NATS URL must look like nats://user:password@host:port")
    found: dict[str, Any] = {"nats_url": f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"}
    if parts.username:
        found |= {"nats_user": unquote(parts.username), "nats_password": SecretStr(unquote(parts.password or ""))}
    return found


@asynccontextmanager
async def connected(role: str, where: Where) -> AsyncIterator[Bus]:
    """The bus for the length of the block. Raises what prevents it, in words for the user."""
    from shared import logs
    from shared.bus import Bus
    from shared.settings import NATS_FILE, connection

    logs.setup("error")
    settings = where.settings()
    own = settings.nats_url is not None or (settings.state_dir / NATS_FILE).exists()
    if not own and (external := running(settings.state_dir).get("nats_url")):
        raise Misconfigured(
            f"the pipeline of {settings.state_dir} uses the NATS server {external}: "
            "give --nats-url with a user and its password"
        )
    access = connection(settings, role)
    bus = await Bus.connect(
        access.url,
        user=access.user,
        password=access.password,
        name=f"kvrelay-{role}",
        namespace=settings.namespace,
        timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        yield bus
    finally:
        await bus.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine; Ctrl-C cancels it, waits for it to clean up, and ends the command with exit code 1."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(1) from None
