"""From a client's message to an admitted request: every check that needs no worker, and tokenising. No I/O.

Everything a client can get wrong is refused here, at once and by name, so that workers only see work they can do.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.gateway.request import Request
from shared.errors import BadRequest, NotFound, TooLarge
from shared.messages import Generate

HEAVY_CHARACTERS = 256  # about 50 µs of tokenising: more leaves the event loop
MESSAGE_CHARACTERS = 16  # what a template puts around a message costs about as much as this
PREFIX_CHARACTERS = 8  # per token of the context: more than most texts have


class Tokenizes(Protocol):
    """What intake needs of `shared.models.tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special: bool = ...) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


class Intake:
    """Checks and tokenises. `max_model_len` counts prompt and answer together, in tokens; `names` are the model's."""

    def __init__(
        self,
        tokenizer: Tokenizes,
        *,
        names: Sequence[str],
        vocab_size: int,
        eos_token_ids: list[int],
        max_model_len: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.names = names
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len

    def check(self, generate: Generate) -> None:
        """Everything that can be said before tokenising. Raises BadRequest or NotFound."""
        if generate.model is not None and generate.model not in self.names:
            raise NotFound(f"model: {generate.model[:100]!r} is not served here; {self.names[0]!r} is")
        inputs = {"prompt": generate.prompt, "messages": generate.messages, "token_ids": generate.token_ids}
        given = [name for name, value in inputs.items() if value is not None]
        if len(given) != 1:
            raise BadRequest(f"give exactly one of prompt, messages and token_ids, not {' and '.join(given) or 'none'}")
        if not inputs[given[0]]:
            raise BadRequest(f"{given[0]}: must not be empty")
        if generate.token_ids:
            self._known(max(generate.token_ids), "token_ids")
        for token in generate.sampling.stop_token_ids:
            self._known(token, "sampling.stop_token_ids")
        for token in generate.sampling.logit_bias:
            self._known(token, "sampling.logit_bias")

    def heavy(self, generate: Generate) -> bool:
        """Whether `tokenize` belongs in a thread."""
        size = len(generate.prompt or "")
        size += sum(len(message.content) + MESSAGE_CHARACTERS for message in generate.messages or ())
        return size > HEAVY_CHARACTERS

    def tokenize(self, generate: Generate) -> list[int]:
        """The prompt's token ids, never empty. Raises TooLarge, soon, for a text far beyond the context."""
        if generate.token_ids is not None:
            return list(generate.token_ids)
        if generate.messages is not None:
            self._bounded("".join(message.content for message in generate.messages))
            tokens = self.tokenizer.encode_chat([message.model_dump() for message in generate.messages])
        else:
            self._bounded(generate.prompt or "")
            tokens = self.tokenizer.encode(generate.prompt or "")
        if not tokens:
            raise BadRequest("prompt: must not be empty; this text has no tokens")
        return tokens

    def admit(
        self, generate: Generate, tokens: list[int], *, request_id: str, wall: float, now: float, deadline: float | None
    ) -> Request:
        """The request itself: its length is bounded and its seed is drawn, so that every attempt is the same."""
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise TooLarge(
                f"the prompt has {len(tokens)} tokens, but the context is {self.max_model_len} tokens, "
                "prompt and answer together; shorten the prompt"
            )
        max_tokens = room if generate.max_tokens is None else generate.max_tokens
        if max_tokens > room:
            raise TooLarge(
                f"max_tokens: {max_tokens} is more than the {room} tokens that the prompt of {len(tokens)} leaves of "
                f"the context of {self.max_model_len}"
            )
        if generate.sampling.min_tokens > max_tokens:
            wanted = generate.sampling.min_tokens
            raise BadRequest(f"sampling.min_tokens: {wanted} is more than max_tokens {max_tokens}")
        if generate.sampling.seed is None:
            sampling = generate.sampling.model_copy(update={"seed": secrets.randbits(63)})
            generate = generate.model_copy(update={"sampling": sampling})
        return Request(
            id=request_id,
            work_id=request_id if generate.request_id is None else _work_id(request_id),
            generate=generate,
            prompt=tokens,
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids,
            arrival_s=wall,
            started=now,
            deadline=deadline,
            progress_at=now,
        )

    def _bounded(self, text: str) -> None:
        """Tokenises longer and longer beginnings of a text that seems too long, so that refusing it costs little.

        A whole text can have fewer tokens than its beginning, but not by an eighth of the context.
        """
        size = PREFIX_CHARACTERS * self.max_model_len
        while size < len(text):
            count = len(self.tokenizer.encode(text[:size]))
            if count > self.max_model_len + self.max_model_len // 8:
                raise TooLarge(
                    f"the prompt has more than {count} tokens, but the context is {self.max_model_len} tokens, "
                    "prompt and answer together; shorten the prompt"
                )
            size *= 2

    def _known(self, token: int, path: str) -> None:
        if not 0 <= token < self.vocab_size:
            raise BadRequest(f"{path}: token id {token} is not in the vocabulary of {self.vocab_size} tokens")


def _work_id(request_id: str) -> str:
    """A name for workers that begins as the client's and is used only once. At most 128 characters, as a RequestId."""
    return f"{request_id[:111]}.{secrets.token_hex(8)}"
