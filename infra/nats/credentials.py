"""The passwords of one run, as a file in the state directory that only its owner can read.

    {"url": "nats://127.0.0.1:4222", "users": {"gateway": "…", …, "client": "…", "admin": "…"}}

A user has the name of its role.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from infra.nats.roles import ROLES

FILE_NAME = "nats.json"


@dataclass(frozen=True)
class Credentials:
    """Where the server is and the password of each role."""

    url: str
    users: dict[str, str] = field(repr=False)

    @classmethod
    def generate(cls, url: str) -> Credentials:
        """Fresh random passwords for every role."""
        return cls(url, {role: secrets.token_urlsafe(24) for role in ROLES})

    def write(self, state_dir: Path) -> Path:
        """Writes the file atomically with mode 0600 and returns its path."""
        path = state_dir / FILE_NAME
        private = path.with_suffix(".new")
        private.unlink(missing_ok=True)
        descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"url": self.url, "users": self.users}, file)
        private.replace(path)
        return path
