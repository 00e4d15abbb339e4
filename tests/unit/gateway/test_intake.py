from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from services.gateway.intake import Intake
from shared.errors import BadRequest, TooLarge
from shared.messages import ChatMessage, Generate

CONTEXT = 64
LONGEST = 40  # characters a token can stand for


class Runs:
    """One token for each run of a letter, of at most `LONGEST`. Notes how much text it was given."""

    def __init__(self) -> None:
        self.seen = 0

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        self.seen += len(text)
        ids: list[int] = []
        run = 0
        for at, letter in enumerate(text):
            if at and letter == text[at - 1] and run < LONGEST:
                run += 1
            else:
                ids.append(ord(letter))
                run = 1
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


@pytest.fixture
def intake() -> Intake:
    return Intake(Runs(), names=["m"], vocab_size=200, eos_token_ids=[2], max_model_len=CONTEXT)


def chat(text: str) -> Generate:
    return Generate(messages=[ChatMessage(role="user", content=text)])


@pytest.mark.parametrize("ask", [lambda text: Generate(prompt=text), chat])
def test_a_text_far_too_long_is_refused_after_its_beginning(intake: Intake, ask: Any) -> None:
    with pytest.raises(TooLarge, match=f"the context is {CONTEXT} tokens"):
        intake.tokenize(ask("ab" * 100_000))
    assert isinstance(intake.tokenizer, Runs) and intake.tokenizer.seen <= 16 * CONTEXT


@pytest.mark.parametrize("ask", [lambda text: Generate(prompt=text), chat])
def test_a_text_of_long_tokens_is_not_mistaken_for_too_long(intake: Intake, ask: Any) -> None:
    assert len(intake.tokenize(ask("a" * (LONGEST * (CONTEXT - 1))))) == CONTEXT - 1
    with pytest.raises(TooLarge):
        intake.tokenize(ask("a" * LONGEST * 1000))


def test_unknown_token_ids_are_named(intake: Intake) -> None:
    intake.check(Generate(token_ids=[0, 199]))
    with pytest.raises(BadRequest, match="token_ids: token id 200"):
        intake.check(Generate(token_ids=[0, 200, 5]))


def test_many_empty_messages_are_heavy(intake: Intake) -> None:
    message = ChatMessage(role="user", content="")
    assert intake.heavy(Generate(messages=[message] * 1000))
    assert not intake.heavy(Generate(messages=[message]))
