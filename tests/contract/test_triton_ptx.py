"""The PTX that unpacks codes, carried out here for every byte: no GPU is needed to know what it computes."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.formats._codes import E4M3, E5M2, INT8
from kernels.triton import _ptx as ptx

BYTES = np.arange(256, dtype=np.uint8)


def carry_out(text: str, word: int) -> np.ndarray:
    """The four fp16 that the PTX `text` makes of one 32-bit word."""
    registers = {"$2": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in re.findall(r"^([a-z0-9.]+) (.*);$", text, re.MULTILINE):
        name, target, operands = line[0], line[1].split(", ")[0], line[1].split(", ")[1:]
        kind = name.split(".")[0]
        if not kind:
            continue
        given = [value(operand) for operand in operands]
        registers[target] = OPERATIONS[name](*given) & 0xFFFFFFFF
    return np.array([registers["$0"], registers["$1"]], dtype=np.uint32).view(np.float16)


def permute(a: int, b: int, selector: int) -> int:
    both = (b << 32) | a
    picks = [(selector >> 4 * i) & 15 for i in range(4)]
    assert all(pick < 8 for pick in picks)
    return sum(((both >> 8 * pick) & 255) << 8 * i for i, pick in enumerate(picks))


def logic3(a: int, b: int, c: int, table: int) -> int:
    # the table is the wanted function of 0xF0, 0xCC and 0xAA
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
    return sum((table >> index & 1) << i for i, index in enumerate(bits))


def pairs(a: int, b: int, operation: np.ufunc) -> int:
    left, right = (np.array([word], dtype=np.uint32).view(np.float16) for word in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        return int(operation(left, right).view(np.uint32)[0])


OPERATIONS = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "lop3.b32": logic3,
    "sub.rn.f16x2": lambda a, b: pairs(a, b, np.subtract),
    "mul.rn.f16x2": lambda a, b: pairs(a, b, np.multiply),
}


def all_bytes(text: object) -> np.ndarray:
    words = BYTES.view(np.uint32).tolist()
    return np.concatenate([carry_out(text.value, word) for word in words])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "code"), [(ptx.INT8, INT8), (ptx.E4M3, E4M3), (ptx.E5M2, E5M2)])
def test_eight_bit_codes(text: object, code: object) -> None:
    exact = code.decode(torch.from_numpy(BYTES), torch.float32).numpy()  # type: ignore[attr-defined]
    real = np.isfinite(exact)
    assert real.sum() >= 248
    assert np.array_equal(all_bytes(text)[real].astype(np.float32), exact[real])


def test_four_bit_codes_come_with_1024_added() -> None:
    assert np.array_equal(all_bytes(ptx.LOW4), (BYTES & 15) + np.float16(1024))
    assert np.array_equal(all_bytes(ptx.HIGH4), (BYTES >> 4) + np.float16(1024))
