"""Files of prompts: lines, JSON lines, and what is neither."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from services.cli.prompts import read_prompts
from shared.errors import Misconfigured


def test_one_prompt_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Hello world\n\n  \nWas ist das?\n")
    assert read_prompts(str(path)) == ["Hello world", "Was ist das?"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    assert read_prompts("-") == ["from stdin"]


def test_json_lines_of_prompts_chats_and_batch_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = '{"messages": [{"role": "user", "content": "hi"}]}'
    path.write_text(f'{{"prompt": "one\\ntwo"}}\n{chat}\n\n{{"custom_id": "1", "body": {chat}}}\n')
    messages = [{"role": "user", "content": "hi"}]
    assert read_prompts(str(path)) == ["one\ntwo", messages, messages]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        "{}",
        '{"prompt": ""}',
        '{"prompt": "a", "messages": []}',
        '{"messages": []}',
        '{"messages": ["x"]}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(Misconfigured, match=r"prompts\.jsonl:2: "):
        read_prompts(str(path))


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="cannot read"):
        read_prompts(str(tmp_path / "nothing"))
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(Misconfigured, match="no prompts"):
        read_prompts(str(tmp_path / "empty"))


def test_bytes_that_are_no_text_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(Misconfigured, match=r"latin.*utf-8"):
        read_prompts(str(tmp_path / "latin"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    with pytest.raises(Misconfigured, match=r"stdin.*utf-8"):
        read_prompts("-")
