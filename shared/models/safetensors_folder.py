"""A Hugging Face model folder as a source of configuration and weights: one safetensors file, or indexed shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import Misconfigured
from shared.models.architecture import Part
from shared.models.config import ModelConfig
from shared.models.fields import Fields
from shared.models.huggingface import model_config
from shared.models.weight_file import WeightReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Everything besides weights that decides what the model says.
METADATA = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in `path`; `{}` for an absent file that is not required."""
    if not required and not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Misconfigured(f"{path.parent}: {path.name} is missing") from None
    except ValueError as error:
        raise Misconfigured(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise Misconfigured(f"{path}: must hold a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Misconfigured if there are none or a shard is missing."""
    if (folder / INDEX).exists():
        index = Fields(str(folder / INDEX), read_json(folder / INDEX))
        shards = sorted({str(name) for name in index.table("weight_map").values.values()})
        missing = [name for name in shards if Path(name).name != name or not (folder / name).is_file()]
        if missing or not shards:
            raise Misconfigured(f"{folder}: weight files named in {INDEX} are missing: {', '.join(missing) or 'all'}")
        return [folder / name for name in shards]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    hint = " (only PyTorch .bin files are there; convert them to safetensors)" if list(folder.glob("*.bin")) else ""
    raise Misconfigured(f"{folder}: no {SINGLE} and no {INDEX}{hint}")


class FolderSource:
    """Opens all weight files of `path`. Misconfigured: missing or damaged files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields = Fields(str(path / "config.json"), read_json(path / "config.json"))
        self.architecture = self.fields.text("model_type", "")
        self._config = model_config(self.fields, path.resolve().name)
        self._readers: dict[str, WeightReader] = {}
        for file in weight_files(path):
            reader = WeightReader(file)
            self._readers.update(dict.fromkeys(reader.specs, reader))

    def config(self) -> ModelConfig:
        return self._config

    def part_name(self, part: Part) -> str:
        return part.hf

    def names(self) -> set[str]:
        """Tensors a model must account for: not stored frequencies, nor a head that repeats tied embeddings."""
        tied = {"lm_head.weight"} if self._config.tie_embeddings else set()
        return {name for name in self._readers if not name.endswith("rotary_emb.inv_freq")} - tied

    def shape(self, name: str) -> tuple[int, ...]:
        return self._readers[name].specs[name].shape

    def kind(self, name: str) -> str:
        return self._readers[name].specs[name].dtype

    def read(self, part: Part, start: int, stop: int) -> np.ndarray:
        """float32 rows `start:stop` of `part`. Misconfigured for a type other than F32, F16 and BF16."""
        reader = self._readers[part.hf]
        rows = reader.tensor(part.hf)[start:stop]
        if reader.specs[part.hf].dtype == "BF16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        if reader.specs[part.hf].dtype not in ("F32", "F16"):
            raise Misconfigured(f"{reader.path}: tensor {part.hf!r} has unsupported type {self.kind(part.hf)}")
        return rows.astype(np.float32)
