"""A small SentencePiece vocabulary and its BPE written out: the oracle of tokenizers built from GGUF."""

from __future__ import annotations

import itertools
from typing import Any

WORDS = (
    "he",
    "ll",
    "lo",
    "llo",
    "hello",
    "or",
    "ld",
    "wor",
    "world",
    "\u2581w",
    "\u2581he",
    "\u2581hello",
    "\u2581world",
    "\u2581\u2581",
)
LETTERS = "\u2581helowrd\n你"
SPACE = "\u2581"


def vocabulary() -> list[str]:
    """Three special tokens, 256 bytes, pieces from common to rare, letters."""
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *LETTERS]


def metadata() -> dict[str, Any]:
    """The vocabulary as GGUF metadata."""
    tokens = vocabulary()
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def encode(text: str) -> list[int]:
    """Joins the best scoring pair, leftmost first, until none is left; what has no piece becomes its bytes."""
    index = {token: position for position, token in enumerate(vocabulary())}
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [(index[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in index]
        if not pairs:
            break
        _, at = min(pairs)  # pieces are ordered by falling score
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [index[symbol]] if symbol in index else [3 + byte for byte in symbol.encode()]
    return ids
