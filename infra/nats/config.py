"""The text of the server's configuration file."""

from __future__ import annotations

import json
from pathlib import Path

from infra.nats.credentials import Credentials
from infra.nats.roles import permissions

MAX_PAYLOAD_BYTES = 1 << 20


def render(*, host: str, port: int, folder: Path, namespace: str, credentials: Credentials) -> str:
    """A configuration that listens on one address, keeps JetStream in `folder` and lets in only our roles.

    `port` -1 lets the server choose; it then reports the choice in a ports file in `folder`.
    """
    users = []
    for role, login in credentials.roles.items():
        allowed = permissions(role, namespace)
        users.append(
            f"    {{user: {login.user}, password: {json.dumps(login.password)}, permissions: {{"
            f"publish: {json.dumps(list(allowed.publish))}, subscribe: {json.dumps(list(allowed.subscribe))}}}}}"
        )
    return "\n".join(
        [
            f"listen: {json.dumps(f'{host}:{port}')}",
            "server_name: kvrelay",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            f"ports_file_dir: {json.dumps(str(folder))}",
            f"log_file: {json.dumps(str(folder / 'server.log'))}",
            f"jetstream {{store_dir: {json.dumps(str(folder / 'jetstream'))}}}",
            "authorization {",
            "  timeout: 5",
            "  users = [",
            *users,
            "  ]",
            "}",
            "",
        ]
    )
