"""Prompts from a file: one a line, or JSON lines as batch files of chat services have them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shared.errors import Misconfigured

Prompt = str | list[dict[str, Any]]
"""Text as it is, or chat messages."""


def read_prompts(source: str) -> list[Prompt]:
    """The prompts of a file, or of stdin for `-`. Raises Misconfigured naming the line that is none."""
    text = read_text(source)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise Misconfigured(f"there are no prompts in {source}")
    if not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines]
    return [_of_json(line, f"{source}:{number}") for number, line in lines]


def read_text(source: str) -> str:
    """The text of a file, or of stdin for `-`. Raises Misconfigured if there is none, or none in UTF-8."""
    try:
        return (sys.stdin.buffer.read() if source == "-" else Path(source).expanduser().read_bytes()).decode()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise Misconfigured(f"cannot read {'stdin' if source == '-' else source}: {error}") from error


def _of_json(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise Misconfigured(f"{where}: not JSON: {error}") from error
    body = found.get("body", found) if isinstance(found, dict) else None
    prompt, messages = (body.get("prompt"), body.get("messages")) if isinstance(body, dict) else (None, None)
    if isinstance(prompt, str) and prompt and messages is None:
        return prompt
    turns = messages if isinstance(messages, list) and prompt is None else []
    if turns and all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return turns
    raise Misconfigured(f'{where}: give either "prompt" (text) or "messages" (with role and content)')
