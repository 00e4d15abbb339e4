"""Copies of pages from one ledger to another, as the books see them.

A transfer holds its source and target pages itself: nothing that happens to the leases meanwhile can recycle a page
under the copy. It ends proven (`done`: the mover answered, or never started) or unproven (`abandon`): then the targets
stay quarantined until `done` comes after all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.block_manager.holds import Hold
from services.block_manager.ledger import Ledger
from shared.handles import BlockTable, TailHandle


@dataclass(slots=True, eq=False)
class Transfer:
    """`source[i]` is copied to `target[i]`; `keys` name those of the target that will be findable afterwards."""

    transfer: int
    source: Ledger
    source_hold: Hold
    target: Ledger
    target_hold: Hold
    keys: list[bytes]
    abandoned: bool = False

    def tables(self) -> tuple[BlockTable, BlockTable]:
        """Handles of the source and the target pages."""
        return self.source.table(self.source_hold.pages), self.target.table(self.target_hold.pages)

    def tails(self) -> tuple[TailHandle | None, TailHandle | None]:
        """Handles of the source and the target tail, if the tail is part of the transfer."""
        source, target = self.source_hold.tail, self.target_hold.tail
        return (
            None if source is None else self.source.tail_handle(source),
            None if target is None else self.target.tail_handle(target),
        )


class Transfers:
    """All copies under way or unproven. `late` counts endings of transfers that nobody knows (any more)."""

    def __init__(self, ids: Iterator[int]) -> None:
        self.open: dict[int, Transfer] = {}
        self.late = 0
        self._ids = ids
        self._copying: dict[tuple[str, bytes], Transfer] = {}

    def begin(
        self,
        source: Ledger,
        source_pages: list[int],
        target: Ledger,
        target_pages: list[int],
        keys: list[bytes],
        tails: tuple[int, int] | None = None,
    ) -> Transfer:
        """Holds both sides; `tails` are the source and the target slot. Tell the mover next."""
        source_tail, target_tail = tails or (None, None)
        transfer = Transfer(
            next(self._ids),
            source,
            source.holds.hold(source_pages, source_tail),
            target,
            target.holds.hold(target_pages, target_tail),
            keys,
        )
        self.open[transfer.transfer] = transfer
        for key in keys:
            self._copying.setdefault((target.pool, key), transfer)
        return transfer

    def copying(self, pool: str, key: bytes) -> Transfer | None:
        """The transfer that is bringing this key into `pool` now."""
        return self._copying.get((pool, key))

    def done(self, number: int) -> bool:
        """The mover is proven finished with it (whether it succeeded or not). Unknown ones are ignored and counted."""
        transfer = self.open.pop(number, None)
        if transfer is None:
            self.late += 1
            return False
        self._forget_keys(transfer)
        if not transfer.abandoned:
            transfer.source.holds.let_go(transfer.source_hold)
        transfer.target.holds.let_go(transfer.target_hold)
        return True

    def abandon(self, number: int) -> None:
        """No answer in time: the targets are quarantined until `done`. The sources are only read, they may go."""
        transfer = self.open[number]
        transfer.abandoned = True
        self._forget_keys(transfer)
        transfer.source.holds.let_go(transfer.source_hold)
        transfer.target.holds.quarantine(transfer.target_hold)

    def unproven(self) -> list[Transfer]:
        return [transfer for transfer in self.open.values() if transfer.abandoned]

    def _forget_keys(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            if self._copying.get((transfer.target.pool, key)) is transfer:
                del self._copying[transfer.target.pool, key]
