"""Text to token ids and back, whole or as a stream.

Decoding goes through bytes: every token stands for some bytes, and a text is their concatenation read as UTF-8. So a
stream and a whole decode cannot disagree, whatever the model emits.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from shared.errors import BadRequest, Misconfigured
from shared.models.chat_template import ChatTemplate
from shared.models.files import ModelFiles

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Tokenizer:
    """A model's tokenizer and chat template; any thread may use it."""

    def __init__(self, backend: tokenizers.Tokenizer, files: ModelFiles) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = files.bos_token_id
        self.eos_token_ids = files.eos_token_ids
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        kinds = _decoder_kinds(json.loads(backend.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in kinds
        # Sentence-piece texts begin with a space that only marks the beginning of a word.
        self.strips_first_space = bool({"Strip", "Metaspace"} & kinds.keys()) and not self._byte_level
        if not self._byte_level and not {"ByteFallback", "Metaspace"} & kinds.keys():
            raise Misconfigured(f"{files.tokenizer}: decoder {', '.join(kinds) or 'none'} is not supported")
        self._bytes: dict[int, bytes] = {}
        self._template = ChatTemplate(files.chat_template, files.special.texts) if files.chat_template else None

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """Misconfigured if the file is damaged or of a kind whose tokens are not bytes."""
        return cls(_read(files.tokenizer), files)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; `add_special` puts the tokens around it that the model was trained with (such as BOS).

        Texts of special tokens inside `text` become those tokens. BadRequest for text that is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error
        # `encode` keeps the GIL: a long text would hold up the whole process, whatever thread it is encoded in
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary are nothing."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to a text, as UTF-8 bytes that may be part of a character."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._to_bytes(self.id_to_piece(token))
        return known

    def id_to_piece(self, token: int) -> str:
        """The token as the vocabulary writes it; empty outside the vocabulary."""
        return self._backend.id_to_token(token) or "" if 0 <= token < 2**32 else ""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for `messages`; encode it with `add_special=False`. BadRequest without a template."""
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; send a prompt instead")
        return self._template.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of the prompt for `messages`."""
        return self.encode(self.apply_chat_template(messages, **variables), add_special=False)

    def _to_bytes(self, piece: str) -> bytes:
        if self._byte_level:
            table = _byte_of_character()
            mapped = [table.get(character) for character in piece]
            return piece.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode()


class Detokenizer:
    """Turns a stream of ids into text that can be sent on at once: whole characters only, nothing ever taken back.

    The joined deltas equal `Tokenizer.decode` of all ids. With `prompt_ids` they equal what the ids add to the prompt:
    a leading space is kept, and a character that the prompt began is finished.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        tail = b""
        for token in reversed(prompt_ids):
            if token not in self._skipped:
                tail = self._token_bytes(token) + tail
            if len(tail) >= 4:  # no character is longer, so an unfinished one begins in here
                break
        self._decode(tail)
        self._strip = tokenizer.strips_first_space and not tail

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is unfinished."""
        joined = b"".join(self._token_bytes(token) for token in ids if token not in self._skipped)
        if self._strip and joined:
            self._strip = False
            joined = joined.removeprefix(b" ")
        return self._decode(joined)

    def finish(self) -> str:
        """U+FFFD for a character that will never be finished, else nothing."""
        return self._decode(b"", True)


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers package raises bare Exception for anything it cannot parse
        raise Misconfigured(f"{path}: not a tokenizer that can be read ({error})") from error


def _decoder_kinds(decoder: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Type → settings of a decoder, or of each member of a sequence."""
    if decoder is None:
        return {}
    members = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {member["type"]: member for member in members}


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
