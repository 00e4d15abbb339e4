"""Reading and writing the elements of pages in Triton: one function per byte format of `kernels/formats`.

Eight-bit floats are taken apart with integer operations, since the hardware casts exist on some architectures only and
are wrong in the interpreter. Integers become fp16 by way of 0x6400 | n = 1024 + n, which needs no conversion unit; on
a device in PTX (`_ptx.py`), in the interpreter by the same operations in Triton.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton import _ptx as ptx
from kernels.triton._launch import INTERPRETED

PTX = tl.constexpr(not INTERPRETED)


@triton.jit
def raw_pointer(base, CODE: tl.constexpr, RAW_TYPE: tl.constexpr):
    """uint8 pointers as pointers to the stored elements of a code."""
    if CODE == 0:
        typed = base.to(tl.pointer_type(RAW_TYPE))
    elif CODE == 1:
        typed = base.to(tl.pointer_type(tl.int8))
    else:
        typed = base
    return typed


@triton.jit
def decode(raw, CODE: tl.constexpr, AS: tl.constexpr):
    """Stored elements as values of type AS, exactly where AS can hold them; not for four-bit codes."""
    if CODE == 0:
        value = raw.to(AS)
    elif AS == tl.float16:  # noqa: SIM300
        value = half_value(raw, CODE)
    elif CODE == 1:
        value = raw.to(AS)
    else:
        value = half_bits(raw, CODE).to(AS)
        if CODE == 2:
            value *= 256.0
    return value


@triton.jit
def half_value(raw, CODE: tl.constexpr):
    """fp16 of eight-bit codes; on a device four at a time, and before they change threads, which moves 16-bit units."""
    if PTX:
        text: tl.constexpr = ptx.INT8 if CODE == 1 else (ptx.E4M3 if CODE == 2 else ptx.E5M2)
        value = tl.inline_asm_elementwise(text, "=r,=r,r", [raw], tl.float16, is_pure=False, pack=4)
    elif CODE == 1:
        value = ((raw.to(tl.uint8, bitcast=True) ^ 128).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        value = half_bits(raw, CODE)
        if CODE == 2:
            value *= 256.0
    return value


@triton.jit
def half_bits(raw, CODE: tl.constexpr):
    """fp16 with the exponent and mantissa bits of a float8; those of e4m3 mean 2^-8 times its value in fp16."""
    byte = raw.to(tl.int16)
    bits = ((byte & 128) << 8 | (byte & 127) << 7) if CODE == 2 else byte << 8
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def nibble(raw, PART: tl.constexpr, AS: tl.constexpr):
    """The low (PART 0) or high (1) four bits of bytes, plus `nibble_bias(AS)`, in type AS."""
    if AS == tl.float16 and PTX:  # noqa: SIM300
        text: tl.constexpr = ptx.HIGH4 if PART == 1 else ptx.LOW4
        value = tl.inline_asm_elementwise(text, "=r,=r,r", [raw], tl.float16, is_pure=False, pack=4)
    else:
        code = ((raw >> 4) if PART == 1 else (raw & 15)).to(tl.int16)
        if AS == tl.float16:  # noqa: SIM300
            value = (code | 0x6400).to(tl.float16, bitcast=True)
        else:
            value = code.to(AS)
    return value


@triton.jit
def nibble_zero(zero, AS: tl.constexpr):
    """What `nibble` must be lessened by for the signed byte `zero`."""
    result = zero.to(AS)
    if AS == tl.float16:  # noqa: SIM300
        result += 1024.0
    return result


@triton.jit
def half_scale(base, offset, valid):
    """fp16 scale `offset` elements behind `base`, as stored."""
    return tl.load(base.to(tl.pointer_type(tl.float16)) + offset, mask=valid, other=0.0)


@triton.jit
def small_scale(base, offset, valid):
    """fp32 of an int4 scale byte (5 exponent bits, 3 mantissa bits)."""
    byte = tl.load(base + offset, mask=valid, other=0).to(tl.int32)
    return ((byte << 20) + (103 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def signed(base, offset, valid):
    """A two's complement byte."""
    return tl.load(base.to(tl.pointer_type(tl.int8)) + offset, mask=valid, other=0)


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, of |x| < 2^22. Needs floating-point fusion off, as all of this package."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def half_up(x):
    """The smallest fp16 >= x >= 0, at least 2^-24, at most 65504, as int16 bits and as fp32."""
    near = tl.minimum(x, 65504.0).to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    bits = tl.where(near.to(tl.float32) < x, bits + 1, bits)
    bits = tl.minimum(tl.maximum(bits, 1), 0x7BFF).to(tl.int16)
    return bits, bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def float8(ratio, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP_CODE: tl.constexpr):
    """uint8 codes of a float8 with `MANTISSA` mantissa bits, nearest even, saturating at `TOP_CODE`."""
    bits = ratio.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 128
    shift: tl.constexpr = 23 - MANTISSA
    odd = (magnitude >> shift) & 1
    normal = ((magnitude + ((1 << (shift - 1)) - 1) + odd) >> shift) - ((127 - BIAS) << MANTISSA)
    # below the smallest normal the code is a plain integer multiple of 2^(1 - BIAS - MANTISSA)
    unit: tl.constexpr = 2.0 ** (BIAS + MANTISSA - 1)
    tiny = round_even(magnitude.to(tl.float32, bitcast=True) * unit).to(tl.int32)
    smallest: tl.constexpr = (128 - BIAS) << 23
    code = tl.where(magnitude < smallest, tiny, normal)
    return (tl.minimum(code, TOP_CODE) | sign).to(tl.uint8)


@triton.jit
def encode8(ratio, CODE: tl.constexpr):
    """uint8 codes of |ratio| up to the format's top."""
    if CODE == 1:
        value = round_even(tl.minimum(tl.maximum(ratio, -127.0), 127.0))
        code = value.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    elif CODE == 2:
        code = float8(ratio, 3, 7, 0x7E)
    else:
        code = float8(ratio, 2, 15, 0x7B)
    return code


@triton.jit
def four_bit_range(low, high):
    """Scale byte, its fp32 value and the zero (fp32 integer) of the range [low, high], as `formats/int4.py` says."""
    wide = tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32))
    under = tl.div_rn(low, tl.full(low.shape, -127.0, tl.float32))
    over = tl.div_rn(low, tl.full(low.shape, 128.0, tl.float32))
    need = tl.maximum(wide, tl.maximum(under, over))
    byte = ((need.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - (103 << 3)
    byte = tl.minimum(tl.maximum(byte, 0), 255)
    scale = ((byte << 20) + (103 << 23)).to(tl.float32, bitcast=True)
    zero = round_even(tl.div_rn(-low, scale))
    return byte, scale, tl.minimum(tl.maximum(zero, -128.0), 127.0)


@triton.jit
def four_bit_code(x, scale, zero):
    """int32 codes 0..15."""
    code = round_even(tl.div_rn(x, scale)) + zero
    return tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
