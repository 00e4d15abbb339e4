"""The C structures of step.h, and the buffers one caller of `kv_step_run` owns."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.linear import CLinear

ATTENTION = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
"""`kv_attention`"""
OUT_OF_RANGE = -2
"""`KV_STEP_OUT_OF_RANGE`"""


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class CLayer(ctypes.Structure):
    """`kv_decoder_layer`"""

    _fields_ = (
        *((name, CLinear) for name in ("qkv", "o", "gate_up", "down")),
        *_pointers("input_norm", "post_norm", "q_norm", "k_norm"),
    )


class CModel(ctypes.Structure):
    """`kv_model`"""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")),
        ("is_bf16", ctypes.c_int32),
        ("rows_bf16", ctypes.c_int32),
        ("eps", ctypes.c_float),
        *_pointers("embed", "cos", "sin"),
        ("context", ctypes.c_int64),
        *_pointers("norm", "layer"),
        ("head", CLinear),
    )


class CStep(ctypes.Structure):
    """`kv_step`"""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("logits", ctypes.c_int64),
        *_pointers("tokens", "positions", "logits_rows", "logits_out", "q", "k", "v", "attended", "scratch"),
        ("capacity", ctypes.c_int64),
        ("attention", ATTENTION),
        *_pointers("attention_ctx", "decode", "pool", "calls"),
        ("call_bytes", ctypes.c_int64),
        *_pointers("tails", "append_slots", "append_positions"),
    )


class Buffers:
    """Activations of up to `capacity` rows, in the compute dtype."""

    def __init__(self, library: ctypes.CDLL, model: CModel, capacity: int, dtype: torch.dtype) -> None:
        library.kv_step_scratch.restype = ctypes.c_int64
        size = library.kv_step_scratch(ctypes.byref(model), ctypes.c_int64(capacity))
        self.capacity = capacity
        self.scratch = torch.zeros(size, dtype=torch.uint8)
        self.q = torch.zeros(capacity, model.heads, model.head_dim, dtype=dtype)
        self.k = torch.zeros(capacity, model.kv_heads, model.head_dim, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.attended = torch.zeros_like(self.q)
