"""The pools of this node at start: their memory, and a ledger for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from kernels.layout import PageLayout
from services.block_manager.ledger import Ledger
from services.block_manager.node import Node
from services.block_manager.reserve import longest
from services.block_manager.sizing import blocks_of, tails_of
from shared.errors import Misconfigured
from shared.handles import Layout
from shared.messages import PoolDescription, PoolStats
from shared.models.files import ModelFiles
from shared.pool import Pool, create, cuda_ipc, kind_of, shm
from shared.pool.layout import geometry, layout_for
from shared.settings import BlockManagerSettings

_LEASES_PER_EPOCH = 21


@dataclass(slots=True)
class Memory:
    """Pools by name, their common layout, and the ledgers over them."""

    layout: Layout
    geometry: PageLayout
    pools: dict[str, Pool]
    node: Node
    max_model_len: int

    @classmethod
    def create(cls, settings: BlockManagerSettings, files: ModelFiles, clock: Callable[[], float]) -> Memory:
        """Reserves the memory. Raises Misconfigured if it does not fit the machine, or the settings the model."""
        layout = layout_for(files, settings)
        names = list(dict.fromkeys((settings.prefill_pool, settings.decode_pool)))
        on_gpu = [name for name in names if kind_of(name) == "cuda_ipc"]
        rooms, in_host_memory = cuda_ipc.rooms(on_gpu, settings.state_dir), len(names) - len(on_gpu)
        blocks = {
            name: blocks_of(settings, layout, shm.directory(), max(1, in_host_memory), rooms.get(name))
            for name in names
        }
        max_model_len = _max_model_len(settings, files.config.context_length, min(blocks.values()))
        pools: dict[str, Pool] = {}
        try:
            for name in names:
                pools[name] = create(name, settings.state_dir, layout, blocks[name], tails_of(settings))
        except Misconfigured:
            for pool in pools.values():
                pool.close()
            raise
        # Ids of an earlier incarnation must never name a lease of this one.
        ids = count(next(iter(pools.values())).epoch << _LEASES_PER_EPOCH)
        ledgers = [
            Ledger(
                name,
                pool.epoch,
                pool.blocks,
                pool.slots,
                layout.block_size,
                pool.generations,
                clock,
                max_model_len=max_model_len,
                ids=ids,
            )
            for name, pool in pools.items()
        ]
        return cls(layout, geometry(layout), pools, Node(ledgers, ids), max_model_len)

    def close(self) -> None:
        """Gives the memory up; whoever still maps it sees `Stale`."""
        for pool in self.pools.values():
            pool.close()

    def describe(self, name: str) -> PoolDescription:
        pool = self.pools[name]
        return PoolDescription(
            pool=name,
            kind=kind_of(name),
            path=str(pool.path),
            epoch=pool.epoch,
            blocks=pool.blocks,
            tails=pool.slots,
            layout=self.layout,
            max_model_len=self.max_model_len,
        )

    def stats(self) -> dict[str, PoolStats]:
        return {name: self._stats(ledger) for name, ledger in self.node.ledgers.items()}

    def _stats(self, ledger: Ledger) -> PoolStats:
        pages, layout = ledger.pages, self.layout
        return PoolStats(
            total=pages.total,
            free=pages.free,
            filling=pages.filling,
            active=pages.active,
            cached=pages.cached,
            quarantined=pages.quarantined,
            pinned=pages.pinned,
            block_size=layout.block_size,
            page_bytes=layout.page_bytes,
            bytes_per_token=self.geometry.bytes_per_token(),
            table_share=self.geometry.table_share(),
            scale_share=self.geometry.scale_share(),
            bytes_total=pages.total * layout.page_bytes,
            bytes_used=(pages.total - pages.free) * layout.page_bytes,
            tails_total=ledger.tails.total,
            tails_free=ledger.tails.free,
            leases=len(ledger.leases),
            epoch=ledger.epoch,
            k_format=layout.k_format,
            v_format=layout.v_format,
            hit_tokens=ledger.hits.hit_tokens,
            prompt_tokens=ledger.hits.prompt_tokens,
            evictions=pages.evictions,
            expired_leases=ledger.expired_leases,
            unknown_leases=ledger.leases.unknown,
        )


def _max_model_len(settings: BlockManagerSettings, context_length: int, blocks: int) -> int:
    fits = longest(blocks, settings.block_size)
    wanted = settings.max_model_len
    if wanted is None:
        return min(context_length, fits)
    if wanted > context_length:
        raise Misconfigured(f"max_model_len {wanted} is beyond the model's context of {context_length} tokens")
    if wanted > fits:
        raise Misconfigured(
            f"max_model_len {wanted} does not fit: a pool of {blocks} pages holds one sequence of up to {fits} tokens; "
            f"lower it, or give the pool more memory"
        )
    return wanted
