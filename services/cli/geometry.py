"""What a cached token costs: bytes, and how much of them are scales and book-keeping instead of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from services.cli.machine import Finding
from shared.errors import Misconfigured

if TYPE_CHECKING:
    from kernels.layout import PageLayout
    from shared.models.config import ModelConfig
    from shared.settings import BlockManagerSettings

SHARE_LIMIT: Final = 0.1
LARGEST_BLOCK: Final = 32
COMMON: Final = ("auto", "int8_channel", "int8", "fp8_e4m3", "k16v4", "k8v4", "int4")


def too_small(block_size: int, table_share: float, scale_share: float) -> str:
    """What to do if pages are too small for what comes with each of them; empty: they are not."""
    if block_size >= LARGEST_BLOCK or max(table_share, scale_share) <= SHARE_LIMIT:
        return ""
    what = "scales and padding take" if scale_share > SHARE_LIMIT else "the block table takes"
    return f"{what} {max(table_share, scale_share):.0%} of the cache: --block-size {LARGEST_BLOCK} makes that less"


def findings(config: ModelConfig, settings: BlockManagerSettings) -> list[Finding]:
    """The configured cache, with a warning if its block size is too small for it, and the common formats beside it."""
    from shared.models.files import DTYPES
    from shared.pool.layout import TAIL_FORMATS, pages_for

    tail = TAIL_FORMATS[DTYPES[settings.dtype]]
    try:
        pages = pages_for(config, tail, settings)
    except Misconfigured as error:
        return [Finding("KV cache", "fail", error.text, "correct the setting")]
    advice = too_small(pages.block_size, pages.table_share(), pages.scale_share())
    found = [Finding("KV cache", "warn" if advice else "ok", _text(pages), advice)]
    plain = {"k_cache_dtype": None, "v_cache_dtype": None, "kv_cache_dtype_skip_layers": ()}
    for name in COMMON:
        choice = settings.model_copy(update={**plain, "kv_cache_dtype": name})
        found.append(Finding(f"KV {name}", "ok", _text(pages_for(config, tail, choice))))
    return found


def _text(pages: PageLayout) -> str:
    skipped = f", {len(pages.skip_layers)} layers in {pages.tail_format}" if pages.skip_layers else ""
    return (
        f"{pages.bytes_per_token():,.0f} bytes per token, {pages.k_format}/{pages.v_format}{skipped}, "
        f"block size {pages.block_size}, scales {pages.scale_share():.1%}, table {pages.table_share():.2%}"
    )
