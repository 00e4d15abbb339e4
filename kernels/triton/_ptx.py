"""Unpacking of four bytes ($2) to four fp16 ($0, $1) in PTX: a few instructions on pairs instead of several an element.

Bytes are spread by `prmt` between bytes of 0x64 (fp16 0x6400 | n is 1024 + n for n < 1024) or of 0.
`tests/contract/test_triton_ptx.py` carries these texts out for all bytes.
"""

from __future__ import annotations

import triton.language as tl

INT8 = tl.constexpr("""{
.reg .b32 u, c;
xor.b32 u, $2, 0x80808080;
mov.b32 c, 0x64806480;
prmt.b32 $0, u, 0x64646464, 0x4140;
prmt.b32 $1, u, 0x64646464, 0x4342;
sub.rn.f16x2 $0, $0, c;
sub.rn.f16x2 $1, $1, c;
}""")

E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0x0, 0x1404;
prmt.b32 $1, $2, 0x0, 0x3424;
}""")

E4M3 = tl.constexpr("""{
.reg .b32 a, b, c;
mov.b32 c, 0x5c005c00;
prmt.b32 a, $2, 0x0, 0x1404;
prmt.b32 b, $2, 0x0, 0x3424;
and.b32 $0, a, 0x7f007f00;
and.b32 $1, b, 0x7f007f00;
shr.u32 $0, $0, 1;
shr.u32 $1, $1, 1;
lop3.b32 $0, a, 0x80008000, $0, 0xea;
lop3.b32 $1, b, 0x80008000, $1, 0xea;
mul.rn.f16x2 $0, $0, c;
mul.rn.f16x2 $1, $1, c;
}""")

LOW4 = tl.constexpr("""{
.reg .b32 u;
and.b32 u, $2, 0x0f0f0f0f;
prmt.b32 $0, u, 0x64646464, 0x4140;
prmt.b32 $1, u, 0x64646464, 0x4342;
}""")

HIGH4 = tl.constexpr("""{
.reg .b32 u;
shr.u32 u, $2, 4;
and.b32 u, u, 0x0f0f0f0f;
prmt.b32 $0, u, 0x64646464, 0x4140;
prmt.b32 $1, u, 0x64646464, 0x4342;
}""")
