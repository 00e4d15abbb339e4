"""Ledgers over plain memory and a clock that tests move."""

from __future__ import annotations

from hashlib import blake2b
from itertools import count

import numpy as np

from services.block_manager.leases import LeaseRecord
from services.block_manager.ledger import Ledger
from services.block_manager.node import Node

BLOCK = 4


class ManualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_ledger(
    blocks: int = 16,
    tails: int = 8,
    clock: ManualClock | None = None,
    pool: str = "p",
    born: int = 0,
    **options: object,
) -> Ledger:
    """`born` is the generation that every page and tail has at first."""
    generations = np.full(blocks + tails, born, dtype=np.uint32)
    return Ledger(pool, 1, blocks, tails, BLOCK, generations, clock or ManualClock(), **options)  # type: ignore[arg-type]


def make_node(clock: ManualClock, blocks: int = 16, tails: int = 8, born: int = 0) -> Node:
    """Two pools, `a` and `b`, of one node."""
    ids = count(100)
    return Node((make_ledger(blocks, tails, clock, pool, born, ids=ids) for pool in "ab"), ids)


def chain(text: str) -> list[bytes]:
    """Keys of pages with contents `text[0]`, `text[1]`, …: as with real keys, each depends on all before it."""
    return [blake2b(text[: end + 1].encode(), digest_size=16).digest() for end in range(len(text))]


def run_prompt(ledger: Ledger, text: str, holder: str = "w", **options: object) -> LeaseRecord:
    """A lease for a prompt of full pages `text` and one token more, all committed."""
    keys = chain(text)
    record = ledger.acquire(holder, f"request-{text}", keys, BLOCK * len(text) + 1, **options)  # type: ignore[arg-type]
    assert ledger.commit(holder, record.lease, 0, keys)
    return record


def counts(ledger: Ledger) -> tuple[int, int, int, int, int]:
    """Pages that are free, filling, active, cached and quarantined."""
    pages = ledger.pages
    return pages.free, pages.filling, pages.active, pages.cached, pages.quarantined


def snapshot(ledger: Ledger) -> tuple[object, ...]:
    """All that a refused call must leave as it was."""
    pages = ledger.pages
    return (
        bytes(pages.state), list(pages.refs), list(pages.keys), pages.generations.tolist(), sorted(ledger.leases),
        ledger.tails.free, pages.pinned, pages.evictions,
    )  # fmt: skip
