"""Every setting is a flag, and what was given reaches the actors as variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from services.cli.options import KINDS, NOT_FLAGS, environment, known, misspelt, with_settings
from shared import settings


def parse(*arguments: str) -> dict[str, Any] | str:
    """The flags as a command sees them, or what it said when it refused them."""
    seen: dict[str, Any] = {}

    def command(flags: dict[str, Any], own: int = 3) -> None:
        seen.update(flags, own=own)

    app = typer.Typer(add_completion=False)
    app.command()(with_settings(KINDS.values(), command))
    done = CliRunner().invoke(app, arguments)
    if done.exit_code:
        assert done.exit_code == 2
        return done.output
    return seen


def test_every_setting_has_a_flag_and_none_is_given_by_default() -> None:
    flags = parse()
    assert isinstance(flags, dict)
    assert flags.pop("own") == 3
    assert set(flags) == {name for kind in KINDS.values() for name in kind.model_fields} - NOT_FLAGS
    assert set(flags.values()) == {None}


def test_given_flags_arrive_in_every_settings_class_that_knows_them() -> None:
    flags = parse(
        *("--block-size", "32", "--kv-cache-memory-bytes", "64MiB", "--no-enable-prefix-caching"),
        *("--kv-cache-dtype-skip-layers", "first:1,last:2", "--http-port", "0", "--state-dir", "/tmp/x", "--own", "5"),
    )
    assert isinstance(flags, dict)
    assert flags.pop("own") == 5
    carried = environment(flags)
    for kind in KINDS.values():
        by_flag = settings.load(kind, known(kind, flags), {})
        by_variable = settings.load(kind, {}, carried)
        assert by_flag == by_variable
        assert by_flag.state_dir == Path("/tmp/x")
    cache = settings.load(settings.BlockManagerSettings, {}, carried)
    assert (cache.block_size, cache.kv_cache_memory_bytes, cache.enable_prefix_caching) == (32, 64 << 20, False)
    assert cache.kv_cache_dtype_skip_layers == ("first:1", "last:2")
    assert settings.load(settings.GatewaySettings, {}, carried).http_port == 0


@pytest.mark.parametrize(
    "arguments", [("--block-size", "many"), ("--dtype", "float8"), ("--nonsense", "1"), ("--trace-sample-ratio", "x")]
)
def test_wrong_usage_names_the_flag(arguments: tuple[str, ...]) -> None:
    said = parse(*arguments)
    assert isinstance(said, str) and arguments[0] in said


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVRELAY_MAX_NUM_SEQ", ["KVRELAY_MAX_NUM_SEQS"]),
        ("KVRELAY_KV_CACHE_DTYP", ["KVRELAY_KV_CACHE_DTYPE"]),
        *((f"KVRELAY_{name}", []) for name in ("MAX_NUM_SEQS", "NATS_PASSWORD", "SHM_DIR", "CACHE_DIR", "CONFIG")),
        *((f"KVRELAY_{name}", []) for name in ("CPU_ISA", "PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_80_TCP")),
        ("MAX_NUM_SEQ", []),
    ],
)
def test_a_variable_that_is_almost_a_setting_is_noticed(variable: str, meant: list[str]) -> None:
    assert list(misspelt([variable])) == [(variable, name) for name in meant]
