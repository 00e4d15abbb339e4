"""The text of the server's configuration file."""

from __future__ import annotations

import json
from pathlib import Path

from infra.nats.credentials import Credentials
from infra.nats.roles import permissions

LOG = "server.log"
MAX_PAYLOAD_BYTES = 1 << 20
PING_INTERVAL_S = 10
PINGS_UNANSWERED = 2
"""A client whose host vanished is given up after this many pings without an answer: 30 s instead of 6 min."""


def render(*, host: str, port: int, folder: Path, namespace: str, credentials: Credentials) -> str:
    """A configuration that listens on one address, keeps JetStream in `folder` and lets in only our roles.

    `port` -1 lets the server choose; it then reports the choice in a ports file in `folder`.
    """
    return "\n".join(
        [
            f"listen: {_quoted(f'{host}:{port}')}",
            "server_name: kvrelay",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            f'ping_interval: "{PING_INTERVAL_S}s"',
            f"ping_max: {PINGS_UNANSWERED}",
            f"ports_file_dir: {_quoted(str(folder))}",
            f"log_file: {_quoted(str(folder / LOG))}",
            f"jetstream {{store_dir: {_quoted(str(folder / 'jetstream'))}}}",
            authorization(namespace, credentials),
        ]
    )


def authorization(namespace: str, credentials: Credentials) -> str:
    """The part of a configuration that lets our roles in and keeps them apart; any nats-server can take it."""
    users = []
    for role, login in credentials.roles.items():
        allowed = permissions(role, namespace)
        users.append(
            f"    {{user: {login.user}, password: {_quoted(login.password)}, permissions: {{"
            f"publish: {json.dumps(list(allowed.publish))}, subscribe: {json.dumps(list(allowed.subscribe))}}}}}"
        )
    return "\n".join(["authorization {", "  timeout: 5", "  users = [", *users, "  ]", "}", ""])


def _quoted(text: str) -> str:
    """`text` as NATS reads it: like JSON, but without its \\u escapes."""
    return json.dumps(text, ensure_ascii=False)
