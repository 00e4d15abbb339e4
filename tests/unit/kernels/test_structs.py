"""Every structure is the same on both sides of a native call: a field that is elsewhere in C is a crash, or worse."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import attend, build, gather, geometry, linear, prefill, seal, step, tails

SHARED = [
    (geometry.Side, "kv_side", "attend.h"),
    (geometry.Layer, "kv_layer", "attend.h"),
    (linear.CLinear, "kv_linear", "linear.h"),
    (linear.CRows, "kv_rows", "linear.h"),
    (step.CLayer, "kv_decoder_layer", "step.h"),
    (step.CModel, "kv_model", "step.h"),
    (step.CStep, "kv_step", "step.h"),
    (attend.Decode, "kv_decode", "attend_job.h"),
    (prefill.PrefillCall, "kv_prefill_call", "prefill.c"),
    (seal.SealCall, "kv_seal_call", "seal.c"),
    (gather.GatherCall, "kv_gather_call", "gather.c"),
    (tails.AppendCall, "kv_append_call", "tails.c"),
]
IN_C = {"inputs": "in"}  # `in` is a keyword of Python


@pytest.mark.parametrize(("python", "name", "source"), SHARED, ids=[name for _, name, _ in SHARED])
def test_a_structure_is_the_same_in_c(python: type[ctypes.Structure], name: str, source: str, tmp_path: Path) -> None:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    claims = [f"sizeof({name}) == {ctypes.sizeof(python)}"]
    for field, *_ in python._fields_:
        place, known = getattr(python, field), IN_C.get(field, field)
        claims.append(f"offsetof({name}, {known}) == {place.offset}")
        claims.append(f"sizeof((({name} *)0)->{known}) == {place.size}")
    checks = [f'_Static_assert({claim}, "{claim}");' for claim in claims]
    (tmp_path / "check.c").write_text("\n".join([f'#include "{source}"', "#include <stddef.h>", *checks]))
    command = [*compiler, "-std=c11", "-fsyntax-only", f"-I{build.SOURCES}", str(tmp_path / "check.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_structure_is_missing_here() -> None:
    defined = [
        name
        for path in build.SOURCES.glob("*.py")
        for name in re.findall(r"^class (\w+)\(ctypes\.Structure\)", path.read_text(), re.MULTILINE)
    ]
    assert sorted(defined) == sorted(python.__name__ for python, _, _ in SHARED)
