"""Keys of pages: golden values, the same in every process, chains that can be continued, salts that isolate."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from shared.handles import pack_u32
from shared.prefix import KEY_BYTES, page_keys, root_key, split_keys

PROGRAM = "from shared.prefix import page_keys; print(page_keys('f00d', list(range(40)), 16, 'tenant').hex())"


def test_golden_value() -> None:
    """Pages on disk outlive the program: the meaning of a key must not drift."""
    assert page_keys("f00d", [1, 2, 3, 4], 2).hex() == (
        "f3bd7e6065f39025b234613243d64592bb38b5470125af5d83460900c90f3d2f"
    )


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33])
def test_only_full_pages_have_keys(length: int) -> None:
    assert len(page_keys("f", list(range(length)), 16)) == length // 16 * KEY_BYTES


def test_two_processes_agree_whatever_their_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert outputs == {page_keys("f00d", list(range(40)), 16, "tenant").hex() + "\n"}


def test_the_type_of_the_ids_does_not_matter() -> None:
    ids = [5, 0, 49_151, 70_000] * 8
    expected = page_keys("f", ids, 16)
    assert page_keys("f", np.array(ids, dtype=np.int64), 16) == expected
    assert page_keys("f", pack_u32(ids), 16) == expected


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_chain_can_be_continued_anywhere(first: int) -> None:
    ids = list(range(100, 164))
    keys = page_keys("f", ids, 16, "salt")
    parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else root_key("f", "salt")
    assert page_keys("f", ids, 16, parent=parent, first=first) == keys[first * KEY_BYTES :]
    assert page_keys("f", ids, 16, "salt", first=first) == keys[first * KEY_BYTES :]


def test_fingerprint_salt_and_everything_before_a_page_isolate_it() -> None:
    ids = list(range(64))
    variants = [
        page_keys("f", ids, 16),
        page_keys("g", ids, 16),
        page_keys("f", ids, 16, ""),
        page_keys("f", ids, 16, "a"),
        page_keys("f", ids, 16, "b"),
        page_keys("f", [9, *ids[1:]], 16),
    ]
    every = [key for keys in variants for key in split_keys(keys)]
    assert len(set(every)) == 4 * len(variants)
    late = split_keys(page_keys("f", [*ids[:40], 9, *ids[41:]], 16))
    assert late[:2] == split_keys(variants[0])[:2] and set(late[2:]).isdisjoint(every)


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        split_keys(b"x" * 17)
