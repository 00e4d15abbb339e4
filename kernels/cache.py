"""Where things are kept that can be made again: compiled kernels, converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$KVRELAY_CACHE_DIR`, else `$XDG_CACHE_HOME/kvrelay`, else `~/.cache/kvrelay`."""
    if own := os.environ.get("KVRELAY_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "kvrelay"
