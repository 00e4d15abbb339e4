"""Names of pages: a chain of 16-byte hashes, the same in every process and on every machine.

    key of page i = H(key of page i-1, token ids of page i)        H = blake2b with 16 bytes
    key of page -1 = H(fingerprint), or H(H(fingerprint), salt) when the request has a cache_salt

Ids are hashed as little-endian u32, so a key never depends on the length or the sign of an integer type. The
fingerprint covers model, tokenizer, rope and KV format: pages of another model can never be found.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np

from shared.handles import U32, pack_u32

KEY_BYTES: Final = 16


def root_key(fingerprint: str, salt: str | None = None) -> bytes:
    """The key before the first page. A salt gives a disjoint chain; the empty salt is not the same as none."""
    root = blake2b(fingerprint.encode(), digest_size=KEY_BYTES, person=b"kvrelay.root").digest()
    if salt is None:
        return root
    return blake2b(root + salt.encode(), digest_size=KEY_BYTES, person=b"kvrelay.salt").digest()


def page_keys(
    fingerprint: str,
    tokens: np.ndarray | list[int] | bytes,
    block_size: int,
    salt: str | None = None,
    parent: bytes | None = None,
    first: int = 0,
) -> bytes:
    """Keys of the full pages `first …` of a sequence, 16 bytes each, concatenated; a last partial page has none.

    `tokens` is the whole sequence (ids, or `pack_u32` of them). To go on with a chain, give the key of page `first - 1`
    as `parent`; without it the pages before `first` are hashed again.
    """
    packed = tokens if isinstance(tokens, bytes) else pack_u32(tokens)
    step = block_size * U32.itemsize
    if parent is None:
        key, skip, begin = root_key(fingerprint, salt), first, 0
    else:
        key, skip, begin = parent, 0, first * step
    keys: list[bytes] = []
    for at in range(begin, len(packed) - step + 1, step):
        key = blake2b(key + packed[at : at + step], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return b"".join(keys[skip:])


def split_keys(keys: bytes) -> list[bytes]:
    """The concatenated keys of `page_keys`, one by one. Raises ValueError if the length is not a multiple of 16."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys must be a multiple of {KEY_BYTES} bytes, not {len(keys)}")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
