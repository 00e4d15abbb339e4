"""The passwords of one run, as a file in the state directory that only its owner can read.

    {"url": "nats://127.0.0.1:4222", "users": {"gateway": "…", …, "client": "…", "admin": "…"}}

A user has the name of its role. `shared.settings.connection` reads the file.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from infra.nats.roles import ROLES
from shared.settings import NATS_FILE


@dataclass(frozen=True)
class Login:
    """What one role signs in with."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Credentials:
    """Where the server is and how each role signs in."""

    url: str
    roles: dict[str, Login]

    @classmethod
    def generate(cls, url: str) -> Credentials:
        """Fresh random passwords for every role."""
        return cls(url, {role: Login(role, secrets.token_urlsafe(24)) for role in ROLES})

    def write(self, state_dir: Path) -> Path:
        """Writes the file atomically with mode 0600 and returns its path."""
        path = state_dir / NATS_FILE
        private = path.with_suffix(".new")
        private.unlink(missing_ok=True)
        descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"url": self.url, "users": {role: login.password for role, login in self.roles.items()}}, file)
        private.replace(path)
        return path
