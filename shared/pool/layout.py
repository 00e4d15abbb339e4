"""What a model and the cache settings make of a page; computed alike by the block manager and by every worker."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b

from kernels.layout import page_layout, parse_kv_cache_dtype, parse_skip_layers
from shared.errors import Misconfigured
from shared.handles import Layout
from shared.models.files import ModelFiles
from shared.settings import CacheSettings

_TAIL_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def layout_for(files: ModelFiles, settings: CacheSettings) -> Layout:
    """The layout of pools for this model, with the fingerprint that keeps unlike caches apart.

    `files` come from `prepare(settings.model, settings.dtype)`. Raises Misconfigured for formats, block sizes or layers
    that cannot be.
    """
    config = files.config
    tail_format = _TAIL_FORMATS[files.dtype]
    try:
        k_format, v_format = parse_kv_cache_dtype(
            settings.kv_cache_dtype, settings.k_cache_dtype, settings.v_cache_dtype, tail_format
        )
        skip_layers = parse_skip_layers(settings.kv_cache_dtype_skip_layers, config.layers)
        pages = page_layout(
            k_format,
            v_format,
            settings.block_size,
            config.layers,
            config.kv_heads,
            config.head_dim,
            skip_layers,
            tail_format,
        )
    except ValueError as error:
        raise Misconfigured(str(error)) from error
    layout = Layout(
        k_format=k_format,
        v_format=v_format,
        skip_layers=skip_layers,
        tail_format=tail_format,
        block_size=pages.block_size,
        layers=pages.layers,
        kv_heads=pages.kv_heads,
        head_dim=pages.head_dim,
        page_bytes=pages.page_bytes,
        tail_bytes=pages.tail_bytes,
        fingerprint="",
    )
    return layout.model_copy(update={"fingerprint": _fingerprint(files, layout)})


def _fingerprint(files: ModelFiles, layout: Layout) -> str:
    """Hash of all that decides what the bytes of a page mean and which tokens they stand for."""
    config = {name: value for name, value in dataclasses.asdict(files.config).items() if name != "name"}
    facts = {"identity": files.identity, "config": config, "layout": layout.model_dump(mode="json")}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=16, person=b"kvrelay.pages").hexdigest()
