"""Chat templates of a folder: which of the places that may hold one counts."""

from __future__ import annotations

import json
from pathlib import Path

from shared.models import special_tokens

NAMED = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]


def template_of(folder: Path) -> str | None:
    return special_tokens.from_folder(folder, {}).chat_template


def test_the_nearest_place_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert template_of(tmp_path) is None
    settings, own = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.json"
    settings.write_text(json.dumps({"chat_template": "in the settings"}))
    assert template_of(tmp_path) == "in the settings"
    own.write_text(json.dumps({"chat_template": "of its own"}))
    assert template_of(tmp_path) == "of its own"
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert template_of(tmp_path) == "a file"


def test_of_several_the_default_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for templates, wanted in ((NAMED, "plain"), (NAMED[:1], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert template_of(tmp_path) == wanted
