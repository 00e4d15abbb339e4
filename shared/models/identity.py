"""Content identity of a model's source files: which weights, configuration and tokenizer these are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from shared.models.safetensors_folder import METADATA, weight_files

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of how many are done."""

# Part of the identity: a changed meaning of the converted files makes new ones, and old pages can never be hit.
CONVERTER_VERSION = 1
_PIECE = 8 << 20


def source_files(path: Path) -> list[Path]:
    """The files whose bytes decide what a model says, in a fixed order. Misconfigured if weights are missing."""
    if path.is_file():
        return [path]
    return [path / name for name in METADATA if (path / name).exists()] + weight_files(path)


def identify(path: Path, records: Path, progress: Progress) -> str:
    """Hex identity of the model at `path`.

    Hashing is remembered in the folder `records` under the files' sizes, times and inodes, so that it happens once.
    """
    if (known := remembered(path, records)) is not None:
        return known
    files = source_files(path)
    stamp = _stamp(files)
    identity = _hash(files, path.is_dir(), progress)
    _remember(_record(path, records), {"version": CONVERTER_VERSION, "stamp": stamp, "identity": identity})
    return identity


def remembered(path: Path, records: Path) -> str | None:
    """What `identify` would return, if it has hashed these very files before; None otherwise. Hashes nothing."""
    known = _recall(_record(path, records))
    if known.get("version") == CONVERTER_VERSION and known.get("stamp") == _stamp(source_files(path)):
        return str(known["identity"])
    return None


def _record(path: Path, records: Path) -> Path:
    return records / f"{hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()}.json"


def _stamp(files: list[Path]) -> list[list[str | int]]:
    found = [(file, file.stat()) for file in files]
    return [[str(file), of.st_size, of.st_mtime_ns, of.st_ctime_ns, of.st_ino, of.st_dev] for file, of in found]


def _hash(files: list[Path], named: bool, progress: Progress) -> str:
    total, done = sum(file.stat().st_size for file in files), 0
    whole = hashlib.blake2b(b"kvrelay model %d" % CONVERTER_VERSION, digest_size=16)
    for file in files:
        own = hashlib.blake2b(digest_size=32)
        with open(file, "rb") as stream:
            while piece := stream.read(_PIECE):
                own.update(piece)
                done += len(piece)
                progress("identifying the model", done, total)
        # A lone file may be renamed freely; inside a folder the name tells the file's role.
        whole.update((file.name if named else "").encode() + b"\0" + own.digest())
    return whole.hexdigest()


def _recall(record: Path) -> dict[str, object]:
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and "identity" in content else {}


def _remember(record: Path, content: dict[str, object]) -> None:
    # Only a memory: a cache that cannot be written, such as one inside an image, is still good for reading.
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content))
        partial.replace(record)
