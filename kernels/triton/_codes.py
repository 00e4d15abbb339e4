"""Reading and writing the elements of pages in Triton: one function per byte format of `kernels/formats`.

Addresses: `base` are uint8 pointers to the layer's segment inside each token's page, int64 arithmetic done by the caller.
Eight-bit floats are taken apart with integer operations, since the hardware casts exist on some architectures only and are
wrong in the interpreter.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

RAW = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E5M2 = tl.constexpr(3)
INT4 = tl.constexpr(4)

PER_TOKEN = tl.constexpr(0)
PER_CHANNEL = tl.constexpr(1)
PER_TENSOR = tl.constexpr(2)
NONE = tl.constexpr(3)


@triton.jit
def element(base, offset, valid, CODE: tl.constexpr, RAW_TYPE: tl.constexpr):
    """fp32 (RAW: RAW_TYPE) values of the elements `offset` behind `base`; four-bit codes are not for this function."""
    if CODE == 0:
        typed = base.to(tl.pointer_type(RAW_TYPE)) + offset
        value = tl.load(typed, mask=valid, other=0.0)
    elif CODE == 1:
        typed = base.to(tl.pointer_type(tl.int8)) + offset
        value = tl.load(typed, mask=valid, other=0).to(tl.float32)
    else:
        byte = tl.load(base + offset, mask=valid, other=0).to(tl.int32)
        sign = (byte & 128) << 8
        if CODE == 2:
            # the same exponent and mantissa bits in fp16 mean 2^-8 times the value, subnormals included
            half = (sign | (byte & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
            value = half.to(tl.float32) * 256.0
        else:
            value = (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def half_scale(base, offset, valid):
    """fp32 of the fp16 scale `offset` elements behind `base`."""
    return tl.load(base.to(tl.pointer_type(tl.float16)) + offset, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def small_scale(base, offset, valid):
    """fp32 of an int4 scale byte (5 exponent bits, 3 mantissa bits)."""
    byte = tl.load(base + offset, mask=valid, other=0).to(tl.int32)
    return ((byte << 20) + (103 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def signed(base, offset, valid):
    """fp32 of a two's complement byte."""
    return tl.load(base.to(tl.pointer_type(tl.int8)) + offset, mask=valid, other=0).to(tl.float32)


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, of |x| < 2^22. Needs floating-point fusion switched off, as all of this package."""
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
