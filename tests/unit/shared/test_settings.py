"""Where settings come from, which source wins, and what a wrong one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared import settings
from shared.errors import Misconfigured
from shared.settings import (
    BlockManagerSettings,
    CommonSettings,
    DecodeSettings,
    GatewaySettings,
    OffloadSettings,
    PrefillSettings,
    WrongFlag,
    load,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kvrelay.toml"
    path.write_text("max_num_seqs = 4\nhttp_port = 1\n[prefill]\nthreads = 3\n[decode]\nmax_num_seqs = 9\n")
    return path


def test_defaults_file_variables_flags_in_that_order(config: Path) -> None:
    environ = {"KVRELAY_CONFIG": str(config)}
    assert load(BlockManagerSettings, {}, environ).max_num_seqs == 4
    assert load(PrefillSettings, {}, environ).threads == 3
    assert load(DecodeSettings, {}, environ).max_num_seqs == 9
    assert load(DecodeSettings, {}, environ).threads is None
    environ["KVRELAY_MAX_NUM_SEQS"] = "5"
    assert load(DecodeSettings, {}, environ).max_num_seqs == 5
    assert load(DecodeSettings, {"max_num_seqs": 6}, environ).max_num_seqs == 6
    assert load(DecodeSettings, {"max_num_seqs": None}, environ).max_num_seqs == 5


def test_lists_and_sizes_as_text() -> None:
    environ = {"KVRELAY_KV_CACHE_DTYPE_SKIP_LAYERS": "0, last:2", "KVRELAY_KV_CACHE_MEMORY_BYTES": "1.5GiB"}
    found = load(BlockManagerSettings, {}, environ)
    assert found.kv_cache_dtype_skip_layers == ("0", "last:2")
    assert found.kv_cache_memory_bytes == 3 * 2**29
    assert load(BlockManagerSettings, {"kv_cache_memory_bytes": 4096}, {}).kv_cache_memory_bytes == 4096


@pytest.mark.parametrize(
    ("kind", "overrides", "environ", "text"),
    [
        (GatewaySettings, {"http_port": 70_000}, {}, r"http_port \(flag\)"),
        (GatewaySettings, {}, {"KVRELAY_HTTP_PORT": "x"}, r"http_port \(KVRELAY_HTTP_PORT\)"),
        (GatewaySettings, {"htp_port": 1}, {}, "did you mean 'http_port'"),
        (DecodeSettings, {"dtype": "int3"}, {}, "bfloat16"),
        (BlockManagerSettings, {"kv_cache_memory_bytes": "lots"}, {}, "512MiB"),
        (CommonSettings, {}, {"KVRELAY_CONFIG": "/nowhere.toml"}, "does not exist"),
        (CommonSettings, {"state_dir": "~nobody-of-this-name/x"}, {}, r"state_dir \(flag\)"),
    ],
)
def test_a_wrong_setting_names_itself_and_its_source(kind: type, overrides: dict, environ: dict, text: str) -> None:
    with pytest.raises(Misconfigured, match=text):
        load(kind, overrides, environ)


def test_a_typo_in_the_file_is_not_ignored(config: Path) -> None:
    config.write_text("max_num_seq = 4\n")
    with pytest.raises(Misconfigured, match="max_num_seqs"):
        load(DecodeSettings, {}, {"KVRELAY_CONFIG": str(config)})
    config.write_text("max_num_seqs = = 4\n")
    with pytest.raises(Misconfigured, match="cannot read"):
        load(DecodeSettings, {}, {"KVRELAY_CONFIG": str(config)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\nthreads = 3\n", "gateway has no setting 'threads'; it belongs to prefill, decode"),
        ("[gateway]\nmax_num_seqs = 3\n", "gateway has no setting 'max_num_seqs'; it belongs to decode, block_manager"),
        ("[gatway]\nhttp_port = 3\n", "did you mean 'gateway'"),
        ("prefill = 3\n", r"write \[prefill\]"),
        ("[[prefill]]\nthreads = 3\n", r"write \[prefill\]"),
    ],
)
def test_a_setting_in_the_wrong_place_is_told_where_it_belongs(config: Path, text: str, said: str) -> None:
    config.write_text(text)
    with pytest.raises(Misconfigured, match=said):
        load(GatewaySettings, {}, {"KVRELAY_CONFIG": str(config)})


@pytest.mark.parametrize(
    ("kind", "name", "owners"),
    [
        (DecodeSettings, "max_num_batched_tokens", "prefill"),
        (DecodeSettings, "prefill_pool", "gateway, prefill, block_manager, offload"),
        (DecodeSettings, "num_blocks_override", "block_manager"),
        (PrefillSettings, "max_num_seqs", "decode, block_manager"),
        (PrefillSettings, "kv_cache_memory_bytes", "block_manager"),
        (GatewaySettings, "enable_prefix_caching", "prefill, decode, block_manager"),
        (OffloadSettings, "block_size", "gateway, prefill, decode, block_manager"),
    ],
)
def test_a_setting_for_all_passes_those_by_who_do_not_read_it_but_their_own_table_refuses_it(
    config: Path, kind: type[CommonSettings], name: str, owners: str
) -> None:
    environ = {"KVRELAY_CONFIG": str(config)}
    config.write_text(f"{name} = 32\n")
    assert not hasattr(load(kind, {}, {**environ, f"KVRELAY_{name.upper()}": "32"}), name)
    config.write_text(f"[{kind.section}]\n{name} = 32\n")
    with pytest.raises(Misconfigured, match=f"{kind.section} has no setting '{name}'; it belongs to {owners}$"):
        load(kind, {}, environ)


def test_only_a_wrong_flag_is_wrong_usage() -> None:
    with pytest.raises(WrongFlag):
        load(GatewaySettings, {"http_port": 70_000}, {})
    with pytest.raises(Misconfigured) as refusal:
        load(GatewaySettings, {}, {"KVRELAY_HTTP_PORT": "70000"})
    assert not isinstance(refusal.value, WrongFlag)


def test_the_home_folder_is_found_without_a_shell(config: Path) -> None:
    config.write_text('state_dir = "~/kv"\n')
    assert load(CommonSettings, {}, {"KVRELAY_CONFIG": str(config)}).state_dir == Path.home() / "kv"


@pytest.mark.parametrize("place", ["file", "x" * 300])
def test_a_state_directory_that_cannot_be_one_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match="cannot read"):
        settings.connection(load(CommonSettings, {"state_dir": tmp_path / place}, {}), "client")


def test_settings_are_frozen_and_hide_the_password() -> None:
    found = load(CommonSettings, {"nats_password": "hunter2"}, {})
    assert "hunter2" not in repr(found)
    assert "hunter2" not in repr(
        settings.connection(load(CommonSettings, {"nats_url": "x", "nats_password": "hunter2"}, {}), "gateway")
    )
    with pytest.raises(ValueError, match="frozen"):
        found.namespace = "other"  # type: ignore[misc]


def test_the_embedded_server_is_found_through_the_state_directory(tmp_path: Path) -> None:
    found = load(CommonSettings, {"state_dir": tmp_path}, {})
    with pytest.raises(Misconfigured, match="no pipeline runs"):
        settings.connection(found, "gateway")
    (tmp_path / "nats.json").write_text(json.dumps({"url": "nats://h:1", "users": {"gateway": "pw"}}))
    assert settings.connection(found, "gateway") == ("nats://h:1", "gateway", "pw")
    with pytest.raises(Misconfigured, match="user prefill"):
        settings.connection(found, "prefill")
    external = load(CommonSettings, {"nats_url": "nats://other:2", "nats_user": "me", "nats_password": "x"}, {})
    assert settings.connection(external, "gateway") == ("nats://other:2", "me", "x")
