"""Appending tokens to tails. Plain torch: one indexed store a side, which the device runs as one kernel."""

from __future__ import annotations

from kernels.reference.tails import append_tails

__all__ = ["append_tails"]
