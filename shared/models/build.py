"""Fills a cache folder from a source model. Imports gguf and tokenizers, so only conversion imports it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from shared.errors import Misconfigured
from shared.models import convert, gguf_tokenizer, special_tokens
from shared.models.config import ModelConfig, SpecialTokens
from shared.models.files import PACKED, TOKENIZER, WEIGHTS
from shared.models.gguf import GgufSource
from shared.models.identity import Progress
from shared.models.safetensors_folder import FolderSource
from shared.models.weight_file import file_bytes

_SPARE = 64 << 20  # tokenizer, manifest and file system overhead


def fill(folder: Path, path: Path, dtype: str, say: Progress) -> tuple[ModelConfig, SpecialTokens]:
    """Writes weights, packed weights if the source has any, and the tokenizer of the model at `path` into `folder`."""
    say("reading the model", 0, 1)
    source: convert.Source = GgufSource(path) if path.is_file() else FolderSource(path)
    config = source.config()
    wanted = convert.check(source, config)
    packed = convert.packed_specs(source, wanted) if isinstance(source, GgufSource) else []
    needed = file_bytes(convert.weight_specs(wanted, dtype)) + (file_bytes(packed) if packed else 0) + _SPARE
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    tokenizer, special = _tokenizer(source)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= config.vocab_size:
        raise Misconfigured(f"{path}: token {highest} of the tokenizer has no embedding ({config.vocab_size} rows)")
    convert.write_weights(folder / WEIGHTS, source, wanted, dtype, say)
    if isinstance(source, GgufSource) and packed:
        convert.write_packed(folder / PACKED, source, wanted, say)
    (folder / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    return config, special


def _tokenizer(source: convert.Source) -> tuple[Tokenizer, SpecialTokens]:
    if isinstance(source, GgufSource):
        return gguf_tokenizer.build(source.fields), special_tokens.from_gguf(source.fields)
    file = source.path / TOKENIZER
    if not file.exists():
        raise Misconfigured(f"{source.path}: {TOKENIZER} is missing; save the tokenizer in its fast form to get one")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers package raises bare Exception for anything it cannot parse
        raise Misconfigured(f"{file}: not a tokenizer that can be read ({error})") from error
    return tokenizer, special_tokens.from_folder(source.path, tokenizer.get_vocab(with_added_tokens=True))
