"""Builds a `tokenizer.json` from the vocabulary inside a GGUF file.

Two kinds exist there: byte-level BPE (`gpt2`) with a named pre-tokenizer, and SentencePiece BPE (`llama`) whose merges
follow from the scores of the pieces.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.errors import Misconfigured
from shared.models.fields import Fields

KEY = "tokenizer.ggml."
# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Splits applied one after another, each isolating its matches; the names are llama.cpp's.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_ALIASES = {"": "default", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
# A whole word that is a token stays one, whatever the merges say; and a BOS is expected.
_WHOLE_WORDS = ("llama-bpe", "tekken")


def build(fields: Fields) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata. Misconfigured names what is missing or unknown."""
    model = fields.text(KEY + "model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(fields)
    elif model == "llama":
        tokenizer, adds_bos = _sentence_piece(fields), True
    else:
        raise Misconfigured(f"{fields.origin}: tokenizer model {model!r} is not supported; supported are gpt2, llama")
    tokens, types = _vocabulary(fields)
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _frame(tokenizer, fields, tokens, adds_bos)
    return tokenizer


def _vocabulary(fields: Fields) -> tuple[list[str], list[int]]:
    tokens = fields.values.get(KEY + "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise Misconfigured(f"{fields.origin}: the token list {KEY}tokens is missing")
    types = fields.values.get(KEY + "token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise Misconfigured(f"{fields.origin}: {len(tokens)} tokens but {len(types)} token types")
    return tokens, types


def _pairs(fields: Fields) -> list[tuple[str, str]]:
    merges = fields.values.get(KEY + "merges")
    if not isinstance(merges, list):
        raise Misconfigured(f"{fields.origin}: the merge list {KEY}merges is missing")
    pairs = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not (left and separator and right):
            raise Misconfigured(f"{fields.origin}: damaged merge {merge!r}")
        pairs.append((left, right))
    return pairs


def _bpe(fields: Fields, merges: list[tuple[str, str]], **options: object) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(_vocabulary(fields)[0])}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the tokenizers package raises bare Exception for merges outside the vocabulary
        raise Misconfigured(f"{fields.origin}: vocabulary and merges do not fit ({error})") from error


def _byte_level(fields: Fields) -> tuple[Tokenizer, bool]:
    asked = fields.text(KEY + "pre", "default")
    name = _ALIASES.get(asked, asked)
    if name not in _SPLITS:
        raise Misconfigured(f"{fields.origin}: pre-tokenizer {asked!r} is none of {', '.join(_SPLITS)}")
    tokenizer = _bpe(fields, _pairs(fields), ignore_merges=name in _WHOLE_WORDS)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]]
    prefix = fields.flag(KEY + "add_space_prefix", False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _WHOLE_WORDS


def _sentence_piece(fields: Fields) -> Tokenizer:
    tokens, types = _vocabulary(fields)
    merges = _pairs(fields) if KEY + "merges" in fields else _merges_from_scores(fields, tokens)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = _bpe(fields, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    replace = normalizers.Replace(" ", "\u2581")
    prefix = fields.flag(KEY + "add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace] if prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(fields: Fields, tokens: list[str]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose union scores best; so unions in order of score, each with all its splits."""
    scores = fields.values.get(KEY + "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise Misconfigured(f"{fields.origin}: the scores {KEY}scores are missing")
    index = {token: position for position, token in enumerate(tokens)}
    ranked = sorted((position for position, token in enumerate(tokens) if len(token) > 1), key=lambda at: -scores[at])
    merges = []
    for position in ranked:
        token = tokens[position]
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in index and pair[1] in index]
        merges += sorted(known, key=lambda pair: (index[pair[0]], index[pair[1]]))
    return merges


def _frame(tokenizer: Tokenizer, fields: Fields, tokens: list[str], adds_bos: bool) -> None:
    """BOS before and EOS behind a text, as the file asks."""
    special, single = [], ["$A"]
    if fields.flag(KEY + "add_bos_token", adds_bos) and KEY + "bos_token_id" in fields:
        special.append(token_at(fields, "bos", tokens))
        single.insert(0, special[-1][0])
    if fields.flag(KEY + "add_eos_token", False):
        special.append(token_at(fields, "eos", tokens))
        single.append(special[-1][0])
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def token_at(fields: Fields, role: str, tokens: list[str]) -> tuple[str, int]:
    """(text, id) of the special token `role`: bos, eos, eot, unknown, padding."""
    index = fields.integer(f"{KEY}{role}_token_id", minimum=0)
    if index >= len(tokens):
        raise Misconfigured(f"{fields.origin}: {role} token id {index} is outside the vocabulary of {len(tokens)}")
    return tokens[index], index
