"""`prepare`: from a model's name or path to files that every worker maps, converted once per host.

Cache: `<cache>/<identity>-<dtype>/` with manifest.json, weights.safetensors, packed.safetensors and tokenizer.json. A
folder is built under another name and renamed when it is whole, under a lock, so that a half-written one is never seen.
When it is there, `prepare` reads two small JSON files and imports neither torch nor gguf nor tokenizers.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Misconfigured
from shared.models.catalogue import DEFAULT, MANIFEST, models_dir, resolve
from shared.models.config import ModelConfig, SpecialTokens
from shared.models.identity import CONVERTER_VERSION, Progress, identify, remembered

SOURCES = "sources"
WEIGHTS, PACKED, TOKENIZER = "weights.safetensors", "packed.safetensors", "tokenizer.json"
DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "auto": "bfloat16",
}


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A converted model. `packed` is None when the source holds no 4- or 8-bit blocks."""

    config: ModelConfig
    identity: str
    dtype: str
    directory: Path
    weights: Path
    packed: Path | None
    tokenizer: Path
    special: SpecialTokens

    @property
    def chat_template(self) -> str | None:
        return self.special.chat_template

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.special.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return self.special.bos_token_id


def canonical_dtype(dtype: str) -> str:
    """`bfloat16`, `float16` or `float32` for any usual spelling. Misconfigured for others."""
    if dtype not in DTYPES:
        raise Misconfigured(f"dtype {dtype!r} is not supported; use bfloat16, float16 or float32")
    return DTYPES[dtype]


def demo_gguf() -> Path:
    """The GGUF file of the demo model. Misconfigured says how to install it."""
    return resolve(DEFAULT)


def prepare(model: str, dtype: str = "bfloat16", progress: Progress | None = None) -> ModelFiles:
    """Converts `model` (a known name, a GGUF file or a Hugging Face folder) unless it is cached, and says where it is.

    Safe under concurrent use by several processes: one converts, the others wait. Misconfigured says what is wrong with
    the path, the files, the disk or the permissions.
    """
    say = progress or (lambda what, done, total: None)
    dtype = canonical_dtype(dtype)
    path = resolve(model)
    root = models_dir()
    with _plain_errors(root, path):
        root.mkdir(parents=True, exist_ok=True)
        identity = identify(path, root / SOURCES, say)
        directory = root / f"{identity}-{dtype}"
        if (files := _load(directory)) is not None:
            return files
        with _locked(root / f"{directory.name}.lock"):
            if (files := _load(directory)) is None:
                _build(path, identity, dtype, directory, say)
                files = _load(directory)
    if files is None:
        raise Misconfigured(f"{directory} changed while it was being read; is another program writing there?")
    return files


def converted_config(model: str) -> ModelConfig | None:
    """The configuration of `model` if the cache holds a conversion of it, in any dtype; else None. Converts nothing.

    Misconfigured if there is no such model.
    """
    path, root = resolve(model), models_dir()
    with _plain_errors(root, path):
        identity = remembered(path, root / SOURCES)
    for dtype in sorted(set(DTYPES.values())):
        if identity is not None and (files := _load(root / f"{identity}-{dtype}")) is not None:
            return files.config
    return None


def _load(directory: Path) -> ModelFiles | None:
    """The converted model in `directory`, or None unless every file is there in full length."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["version"] != CONVERTER_VERSION:
            return None
        if any((directory / name).stat().st_size != size for name, size in manifest["files"].items()):
            return None
        special = manifest["special"]
        return ModelFiles(
            config=ModelConfig.from_json(manifest["config"]),
            identity=manifest["identity"],
            dtype=manifest["dtype"],
            directory=directory,
            weights=directory / WEIGHTS,
            packed=directory / PACKED if PACKED in manifest["files"] else None,
            tokenizer=directory / TOKENIZER,
            special=SpecialTokens(**{**special, "eos_token_ids": tuple(special["eos_token_ids"])}),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _build(path: Path, identity: str, dtype: str, directory: Path, say: Progress) -> None:
    """Called under the lock: whatever else carries this name is left over from a process that died."""
    from shared.models import build

    for leftover in directory.parent.glob(f".{directory.name}.*"):
        shutil.rmtree(leftover)
    partial = directory.parent / f".{directory.name}.{os.getpid()}"
    partial.mkdir()
    try:
        config, special = build.fill(partial, path, dtype, say)
        names = [file.name for file in partial.iterdir()]
        manifest = {
            "version": CONVERTER_VERSION,
            "identity": identity,
            "dtype": dtype,
            "source": str(path),
            "config": config.to_json(),
            "special": dataclasses.asdict(special),
            "files": {name: (partial / name).stat().st_size for name in sorted(names)},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in [*partial.iterdir(), partial]:
            _sync(file)
        if directory.exists():
            shutil.rmtree(directory)  # damaged, or _load would have taken it; maps of it stay valid
        partial.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the file lock `path`; it ends with the process, however that ends."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _plain_errors(root: Path, source: Path) -> Iterator[None]:
    """Turns the operating system's refusals into what to do about them."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"no space in {root} for the converted model; free some or set KVRELAY_CACHE_DIR"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            mine = "" if str(where).startswith(str(source)) else "; set KVRELAY_CACHE_DIR to a folder of yours"
            text = f"no permission for {where}: {error.strerror}{mine}"
        else:
            text = f"cannot convert {source} into {root}: {error.strerror or error}"
        raise Misconfigured(text) from error
