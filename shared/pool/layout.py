"""What a model and the cache settings make of a page; computed alike by the block manager and by every worker."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b
from typing import NamedTuple

from kernels.layout import PageLayout, page_layout, parse_kv_cache_dtype, parse_skip_layers
from kernels.scale_file import BadScales, ScaleFile, read
from shared.errors import Conflict, Misconfigured
from shared.handles import Layout
from shared.models.config import ModelConfig
from shared.models.files import ModelFiles
from shared.settings import CacheSettings

TAIL_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Cache(NamedTuple):
    """What a pool's pages look like, and the scales that are not in them."""

    layout: Layout
    scales: ScaleFile | None


def layout_for(files: ModelFiles, settings: CacheSettings) -> Layout:
    """The layout of pools for this model, with the fingerprint that keeps unlike caches apart. As `cache_for`."""
    return cache_for(files, settings).layout


def cache_for(files: ModelFiles, settings: CacheSettings) -> Cache:
    """Layout and scales of pools for this model; the scales are read once, and are part of the fingerprint.

    `files` come from `prepare(settings.model, settings.dtype)`. Raises Misconfigured for formats, block sizes, layers
    or a scale file that cannot be.
    """
    pages = pages_for(files.config, TAIL_FORMATS[files.dtype], settings)
    scales = _scales(files, settings, pages)
    layout = Layout(
        k_format=pages.k_format,
        v_format=pages.v_format,
        skip_layers=pages.skip_layers,
        tail_format=pages.tail_format,
        block_size=pages.block_size,
        layers=pages.layers,
        kv_heads=pages.kv_heads,
        head_dim=pages.head_dim,
        page_bytes=pages.page_bytes,
        tail_bytes=pages.tail_bytes,
        fingerprint="",
    )
    return Cache(layout.model_copy(update={"fingerprint": _fingerprint(files, layout, scales)}), scales)


def pages_for(config: ModelConfig, tail_format: str, settings: CacheSettings) -> PageLayout:
    """Where the bytes of a page are, by the cache settings. Raises Misconfigured for what cannot be."""
    try:
        k_format, v_format = parse_kv_cache_dtype(
            settings.kv_cache_dtype, settings.k_cache_dtype, settings.v_cache_dtype, tail_format
        )
        skip_layers = parse_skip_layers(settings.kv_cache_dtype_skip_layers, config.layers)
        shape = (settings.block_size, config.layers, config.kv_heads, config.head_dim)
        return page_layout(k_format, v_format, *shape, skip_layers=skip_layers, tail_format=tail_format)
    except ValueError as error:
        raise Misconfigured(str(error)) from error


def geometry(layout: Layout) -> PageLayout:
    """Byte offsets for the layout two actors agreed on. Raises Conflict if this version would place bytes elsewhere."""
    ours = page_layout(
        layout.k_format,
        layout.v_format,
        layout.block_size,
        layout.layers,
        layout.kv_heads,
        layout.head_dim,
        layout.skip_layers,
        layout.tail_format,
    )
    if (ours.page_bytes, ours.tail_bytes) != (layout.page_bytes, layout.tail_bytes):
        raise Conflict(f"pages have {layout.page_bytes} bytes there and {ours.page_bytes} here: mixed versions")
    return ours


def _scales(files: ModelFiles, settings: CacheSettings, pages: PageLayout) -> ScaleFile | None:
    """A setting that would do nothing is refused like one that is missing."""
    path, formats = settings.kv_scales_path, f"{pages.k_format} keys and {pages.v_format} values"
    if not pages.needs_scales:
        if path is not None:
            raise Misconfigured(f"kv_scales_path is given, but {formats} keep their scales in the page; leave it out")
        return None
    if path is None:
        raise Misconfigured(f"{formats} need kv_scales_path: make the file with `kvrelay calibrate`")
    try:
        return read(path, pages.layers, files.identity, pages.k_format, pages.v_format)
    except BadScales as error:
        raise Misconfigured(f"kv_scales_path: {error}") from error


def _fingerprint(files: ModelFiles, layout: Layout, scales: ScaleFile | None) -> str:
    """Hash of all that decides what the bytes of a page mean and which tokens they stand for."""
    config = {name: value for name, value in dataclasses.asdict(files.config).items() if name != "name"}
    facts: dict[str, object] = {"identity": files.identity, "config": config, "layout": layout.model_dump(mode="json")}
    if scales is not None:
        facts["scales"] = scales.content
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=16, person=b"kvrelay.pages").hexdigest()
