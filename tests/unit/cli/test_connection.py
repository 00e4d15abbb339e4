"""Which pipeline is meant, and who we are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.connection import Where
from shared.errors import Misconfigured
from shared.settings import connection


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STATE_DIR", "NATS_URL", "NATS_USER", "NATS_PASSWORD", "NAMESPACE", "CONFIG"):
        monkeypatch.delenv(f"KVRELAY_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://ann:p%40ss@host:5000", ("nats://host:5000", "ann", "p@ss")),
        ("ann:x@host", ("nats://host:4222", "ann", "x")),
        ("nats://host", ("nats://host:4222", None, None)),
        ("tls://[::1]:4333", ("tls://[::1]:4333", None, None)),
    ],
)
def test_credentials_come_out_of_the_url(url: str, expected: tuple[str, str | None, str | None]) -> None:
    assert tuple(connection(Where(nats_url=url).settings(), "client")) == expected


@pytest.mark.parametrize("url", ["nats://", "nats://host:port", "nats://:5"])
def test_a_url_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match="NATS URL"):
        Where(nats_url=url).settings()


def test_the_state_directory_gives_url_and_password_of_the_role(tmp_path: Path) -> None:
    (tmp_path / "nats.json").write_text(json.dumps({"url": "nats://127.0.0.1:4999", "users": {"client": "secret"}}))
    assert tuple(connection(Where(tmp_path).settings(), "client")) == ("nats://127.0.0.1:4999", "client", "secret")


def test_a_state_directory_by_flag_beats_a_url_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_NATS_URL", "nats://elsewhere")
    assert Where(tmp_path).settings().nats_url is None
    assert Where().settings().nats_url == "nats://elsewhere:4222"
    assert Where(tmp_path, "nats://there").settings().nats_url == "nats://there:4222"


def test_no_pipeline_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="kvrelay up"):
        connection(Where(tmp_path).settings(), "client")
