"""Every setting of every actor. Sources, weakest first: defaults, `kvrelay.toml`, `KVRELAY_*` variables, flags.

`kvrelay.toml` (in the working directory, or where `KVRELAY_CONFIG` points) holds settings at its top level for every
actor that knows them, and in a table named after an actor for that actor alone. Names are those users of vLLM know.
A class has the settings that its actor reads and no others: one that would change nothing is refused.

The embedded NATS server leaves its URL and one password per role in `<state_dir>/nats.json` (mode 0600):
`{"url": …, "users": {role: password}}`; `connection` reads it unless a URL is given.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from shared.errors import Misconfigured
from shared.logs import LogFormat, LogLevel
from shared.notations import Bytes, HomePath, KVFormat, LayerNames, SideFormat

S = TypeVar("S", bound="CommonSettings")
NATS_FILE = "nats.json"


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/kvrelay`, else `~/.local/state/kvrelay`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvrelay"


class CommonSettings(BaseModel):
    """What every actor needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)
    section: ClassVar[str] = ""

    state_dir: HomePath = Field(
        default_factory=default_state_dir, description="where a pipeline keeps what it must find again"
    )
    namespace: str = Field(
        default="kvrelay", pattern=r"^[A-Za-z0-9_-]{1,32}$", description="first word of every subject"
    )
    nats_url: str | None = Field(default=None, description="an external server; default: the one of state_dir")
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    instance: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="name of this process; default: actor and 6 hex digits",
    )
    log_level: LogLevel = Field(default="info", description="of the actors' logs")
    log_format: LogFormat = Field(default="auto", description="auto: for people on a terminal, else JSON")
    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://", description="base URL of an OTLP/HTTP collector"
    )
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1, description="share of the requests that is traced")
    max_inflight: int = Field(default=256, ge=1, description="messages served at once; the next is answered 429")
    drain_timeout_s: float = Field(default=30.0, ge=0, description="how long accepted work may take at stop")


class PrefillPoolSettings(CommonSettings):
    prefill_pool: str = Field(
        default="cpu0", pattern=r"^[a-z0-9_-]{1,32}$", description="pool that prefill works in; cuda0 is on a GPU"
    )


class DecodePoolSettings(CommonSettings):
    decode_pool: str = Field(
        default="cpu0", pattern=r"^[a-z0-9_-]{1,32}$", description="pool that decode works in; another one: copied"
    )


class PoolSettings(DecodePoolSettings, PrefillPoolSettings):
    """Which pools there are."""


class CacheSettings(CommonSettings):
    """The model and the form of its KV cache; the same for all actors that name pages."""

    model: str = Field(default="smollm2-135m", description="a known name, a GGUF file or a Hugging Face folder")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(default="bfloat16", description="of the computation")
    kv_cache_dtype: KVFormat = Field(default="auto", description="auto (dtype), int8_channel, int4, k16v4, k8v4, …")
    k_cache_dtype: SideFormat | None = Field(default=None, description="of keys, instead of kv_cache_dtype")
    v_cache_dtype: SideFormat | None = Field(default=None, description="of values, instead of kv_cache_dtype")
    kv_cache_dtype_skip_layers: LayerNames = Field(
        default=(), description="layers kept in dtype: indices, first:n, last:n"
    )
    kv_scales_path: HomePath | None = Field(
        default=None, description="file of `kvrelay calibrate`, for formats named per_tensor"
    )
    block_size: int = Field(default=16, ge=1, le=256, description="tokens of a page: 16 or 32")
    max_model_len: int | None = Field(
        default=None, ge=1, description="longest sequence in tokens; default: the model's context, or what a pool holds"
    )


class ReuseSettings(CacheSettings):
    """An actor that fills pages, or finds those that are filled."""

    enable_prefix_caching: bool = Field(default=True, description="find pages of earlier prompts")


class BatchSettings(CommonSettings):
    """How much decode does at once, and what the block manager has ready for it."""

    max_num_seqs: int = Field(default=32, ge=1, le=1024, description="sequences of one batch; tails for twice as many")


class WorkerSettings(ReuseSettings):
    """An actor that computes."""

    threads: int | None = Field(default=None, ge=1, le=1024, description="compute threads; default: all usable cores")
    kernels: Literal["auto", "cpu", "reference", "triton"] = Field(
        default="auto", description="auto: the fastest there are; another one or nothing"
    )
    compute_timeout_s: float = Field(
        default=120.0, gt=0, description="longest step: a worker that computes for longer hangs, and is started anew"
    )


class GatewaySettings(CacheSettings, PoolSettings):
    section: ClassVar[str] = "gateway"

    http_host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: every one")
    http_port: int = Field(default=8000, ge=0, le=65_535, description="0: any free one")
    queue_size: int = Field(default=256, ge=1, description="requests that may wait; the next is answered 429")


class PrefillSettings(WorkerSettings, PrefillPoolSettings):
    section: ClassVar[str] = "prefill"

    max_num_batched_tokens: int = Field(default=512, ge=16, description="tokens of one forward pass: the prefill chunk")
    max_num_partial_prefills: int = Field(default=8, ge=1, le=1024, description="prompts computed in turns; more wait")


class DecodeSettings(WorkerSettings, DecodePoolSettings, BatchSettings):
    section: ClassVar[str] = "decode"


class BlockManagerSettings(ReuseSettings, PoolSettings, BatchSettings):
    section: ClassVar[str] = "block_manager"

    num_blocks_override: int | None = Field(default=None, ge=4, description="pages of each pool")
    kv_cache_memory_bytes: Bytes | None = Field(
        default=None, description="of each pool, such as 4GiB; default: 1 GiB, or what the machine allows"
    )


class OffloadSettings(PoolSettings):
    section: ClassVar[str] = "offload"


_ALL: tuple[type[CommonSettings], ...] = (
    GatewaySettings, PrefillSettings, DecodeSettings, BlockManagerSettings, OffloadSettings,
)  # fmt: skip
_KNOWN = frozenset(name for kind in _ALL for name in kind.model_fields)
_SECTIONS = frozenset(kind.section for kind in _ALL)


class WrongFlag(Misconfigured):
    """A flag has a value that its setting may not have: wrong usage of the command line."""


def load(kind: type[S], overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> S:
    """The settings of one actor. `overrides` are flags; None among them means not given.

    Raises Misconfigured (WrongFlag for a flag) naming the setting, where it came from and what it may be.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    source: dict[str, str] = {}

    def take(found: Mapping[str, Any], origin: str) -> None:
        for name, value in found.items():
            values[name] = value
            source[name] = origin

    take(_from_file(kind, environ), "kvrelay.toml")
    for name in kind.model_fields:
        text = environ.get(f"KVRELAY_{name.upper()}")
        if text is not None and text != "":
            take({name: text}, f"KVRELAY_{name.upper()}")
    take({name: value for name, value in (overrides or {}).items() if value is not None}, "flag")
    for name in values.keys() - kind.model_fields.keys():
        raise Misconfigured(_unknown(name, source[name], kind))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        text = problem["msg"].removeprefix("Value error, ").removeprefix(f"{name}: ")
        wrong = WrongFlag if source.get(name) == "flag" else Misconfigured
        raise wrong(f"{name} ({source.get(name, 'default')}): {text}") from None


class NatsAccess(NamedTuple):
    """How to reach NATS."""

    url: str
    user: str | None
    password: str | None

    def __repr__(self) -> str:
        return f"NatsAccess(url={self.url!r}, user={self.user!r})"


def connection(settings: CommonSettings, role: str) -> NatsAccess:
    """Where NATS is and who we are. Raises Misconfigured if there is neither a URL nor a running pipeline."""
    if settings.nats_url is not None:
        password = settings.nats_password.get_secret_value() if settings.nats_password is not None else None
        return NatsAccess(settings.nats_url, settings.nats_user, password)
    path = settings.state_dir / NATS_FILE
    try:
        found = json.loads(path.read_text())
        user = settings.nats_user or role
        return NatsAccess(found["url"], user, found["users"][user])
    except FileNotFoundError:
        raise Misconfigured(
            f"no pipeline runs in {settings.state_dir}: start one with `kvrelay up`, or give --state-dir or --nats-url"
        ) from None
    except PermissionError:
        raise Misconfigured(f"{path} belongs to another user") from None
    except OSError as error:
        raise Misconfigured(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Misconfigured(f"{path} does not name a URL and the user {role}; start the pipeline again") from None


def _from_file(kind: type[CommonSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    given = environ.get("KVRELAY_CONFIG")
    path = Path(given or "kvrelay.toml")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if given:
            raise Misconfigured(f"KVRELAY_CONFIG names {path}, which does not exist") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Misconfigured(f"cannot read {path}: {error}") from None
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and name in _SECTIONS:
            continue
        if name not in _KNOWN:
            raise Misconfigured(_unknown(name, str(path), kind))
        if name in kind.model_fields:
            values[name] = value
    own = content.get(kind.section, {}) if kind.section else {}
    return {**values, **own}


def _unknown(name: str, source: str, kind: type[CommonSettings]) -> str:
    """What is wrong with a name that `kind` does not have."""
    if name in _SECTIONS:
        return f"{source}: {name!r} is a table, not a setting: write [{name}] and its settings below"
    if name in _KNOWN:
        owners = ", ".join(one.section for one in _ALL if name in one.model_fields)
        return f"{source}: {kind.section or 'the command'} has no setting {name!r}; it belongs to {owners}"
    close = difflib.get_close_matches(name, sorted(_KNOWN | _SECTIONS), 1)
    return f"{source}: there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
