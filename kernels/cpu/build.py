"""Compiles `kernels/cpu/*.c` into one shared library on first use and loads it.

The library lives in the cache directory under a key of everything that shapes it: sources, compiler, flags, CPU. Each
file is one object with a key of its own, so that an edit recompiles one file. A lock file makes concurrent first use by
several processes build once; finished files appear by atomic rename. A library ends with its own digest: after a power
cut half of one may be there, which kills the process that maps it.

`KVRELAY_CPU_ISA` = native (default) | avx512 | avx2 | portable picks the instruction set; `CC` the compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kernels.cache import cache_root

SOURCES = Path(__file__).parent
DIGEST_BYTES = hashlib.sha256().digest_size
FLOAT_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
BASE_FLAGS = ("-std=c11", "-O3", "-fPIC", *FLOAT_FLAGS, "-Wall", "-Wextra")
ISA_FLAGS = {
    "native": ("-march=native", "-mprefer-vector-width=512"),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}


class BuildError(RuntimeError):
    """No library: no compiler, an unknown ISA, or the compiler's own words."""


def cache_dir() -> Path:
    """Where compiled libraries are kept."""
    return cache_root() / "kernels"


def isa() -> str:
    """The instruction set asked for. Raises BuildError for an unknown one."""
    name = os.environ.get("KVRELAY_CPU_ISA", "native")
    if name not in ISA_FLAGS:
        raise BuildError(f"KVRELAY_CPU_ISA={name}: must be one of {', '.join(ISA_FLAGS)}")
    return name


@functools.lru_cache(maxsize=1)
def compiler() -> list[str] | None:
    """The C compiler's command, or None. Raises BuildError if CC is no command line."""
    given = os.environ.get("CC", "")
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise BuildError(f"CC={given}: {error}") from error
    for candidate in [words] if words else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(candidate[0])
        if found:
            return [found, *candidate[1:]]
    return None


def _cpu() -> str:
    """What `-march=native` depends on: a binary must not be loaded on a lesser CPU that shares the cache directory."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(line for line in text.split("\n\n")[0].splitlines() if line.startswith(wanted))


def _key(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=10)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _intact(library: Path) -> bool:
    """Whether `library` is there, whole."""
    try:
        data = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _seal(library: Path) -> None:
    """Appends the digest; loaders do not look behind the sections of a library."""
    data = library.read_bytes()
    library.write_bytes(data + hashlib.sha256(data).digest())


def _run(command: list[str], output: Path, finish: Callable[[Path], None] = lambda partial: None) -> None:
    """Runs `command -o` a file which `finish` may change before it appears as `output`."""
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    finish(partial)
    partial.replace(output)


def build() -> Path:
    """The compiled library's path; compiles what is missing. Raises BuildError."""
    command = compiler()
    if command is None:
        raise BuildError("no C compiler found (set CC, or install gcc or clang)")
    flags = [*BASE_FLAGS, *ISA_FLAGS[isa()]]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    common = _key(version, shlex.join(command + flags), _cpu(), *(p.read_bytes() for p in sorted(SOURCES.glob("*.h"))))
    objects = {source: _key(common, source.name, source.read_bytes()) for source in sorted(SOURCES.glob("*.c"))}
    folder = cache_dir()
    library = folder / f"kvrelay-{_key(*objects.values())}.so"
    if _intact(library):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "build.lock"):
        if _intact(library):
            return library
        wanted = {source: folder / f"{source.stem}-{key}.o" for source, key in objects.items()}
        missing = {source: path for source, path in wanted.items() if not path.exists()}
        link = [*command, "-shared", "-pthread", *map(str, wanted.values()), "-lm"]
        _compile([*command, *flags], missing)
        try:
            _run(link, library, _seal)
        except BuildError:
            if len(missing) == len(wanted):
                raise
            _compile([*command, *flags], wanted)  # a power cut can leave an object that is none
            _run(link, library, _seal)
    return library


def _compile(command: list[str], objects: dict[Path, Path]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: _run([*command, "-c", str(source)], objects[source]), objects))


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library of this process. Raises BuildError or OSError; a failed build is tried again on the next call."""
    return ctypes.CDLL(str(build()))


def set_threads(threads: int) -> None:
    """How many threads native ops of this process use, the caller included."""
    load().kv_set_threads(ctypes.c_int32(threads))
