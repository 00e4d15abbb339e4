"""The tokens with a role (begin, end, padding) and the chat template, from GGUF metadata or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.errors import Misconfigured
from shared.models import gguf_tokenizer
from shared.models.architecture import load
from shared.models.config import SpecialTokens
from shared.models.fields import Fields
from shared.models.safetensors_folder import read_json

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def from_gguf(fields: Fields) -> SpecialTokens:
    """Misconfigured if an id lies outside the vocabulary."""
    tokens: list[str] = fields.values[gguf_tokenizer.KEY + "tokens"]
    found = {
        role: gguf_tokenizer.token_at(fields, role, tokens)
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if f"{gguf_tokenizer.KEY}{role}_token_id" in fields
    }
    ends = [found[role][1] for role in ("eos", "eot", "eom") if role in found]
    types = fields.values.get(gguf_tokenizer.KEY + "token_type") or []
    stop_tokens = load(fields.text("general.architecture")).stop_tokens
    ends += [
        index for index, kind in enumerate(types) if kind == gguf_tokenizer.CONTROL and tokens[index] in stop_tokens
    ]
    return SpecialTokens(
        texts={name: found[role][0] for name, role in ROLES.items() if role in found},
        bos_token_id=found["bos"][1] if "bos" in found else None,
        eos_token_ids=tuple(sorted(set(ends))),
        chat_template=fields.text("tokenizer.chat_template", "") or None,
    )


def from_folder(folder: Path, vocabulary: dict[str, int]) -> SpecialTokens:
    """`vocabulary` maps a token's text to its id, added tokens included."""
    settings = read_json(folder / "tokenizer_config.json", required=False)
    mapped = read_json(folder / "special_tokens_map.json", required=False)
    texts = {}
    for name in ROLES:
        value = settings.get(name) or mapped.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    model, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json", required=False)
    ends = {*_ids(folder, model, "eos_token_id"), *_ids(folder, generation, "eos_token_id")}
    if texts.get("eos_token") in vocabulary:
        ends.add(vocabulary[texts["eos_token"]])
    bos = vocabulary.get(texts.get("bos_token", ""))
    if bos is None:
        bos = next(iter(_ids(folder, model, "bos_token_id")), None)
    return SpecialTokens(texts, bos, tuple(sorted(ends)), _chat_template(folder, settings))


def _ids(folder: Path, content: dict[str, Any], key: str) -> list[int]:
    value = content.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise Misconfigured(f"{folder}: {key} must be a token id or a list of them, not {value!r}")
    return ids


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json", required=False).get("chat_template")
    template = template or settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
