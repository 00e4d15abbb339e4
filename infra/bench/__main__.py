"""`make bench`: what kvrelay does on this machine.

python -m infra.bench                    a short run of kernels, step and pipeline
python -m infra.bench --list             every benchmark
python -m infra.bench step --chunk 256   one of them, with its own options (`--help` names them)
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SHORT = {"kernels": ("--quick",), "step": ("--prompt", "512"), "pipeline": ("--repeat", "2")}


def benchmarks() -> dict[str, str]:
    """Name and purpose of every file here that can be run."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in module.body):
            purpose = (ast.get_docstring(module) or "").splitlines()[0]
            purpose = (purpose.partition("`: ")[2] or purpose).rstrip(".")
            found[path.stem] = purpose[0].upper() + purpose[1:]
    return found


def run(name: str, options: tuple[str, ...]) -> int:
    """One benchmark in a process of its own, because each sets up threads as it needs them; its exit code."""
    return subprocess.run([sys.executable, "-m", f"infra.bench.{name}", *options]).returncode


def main(arguments: list[str]) -> int:
    known = benchmarks()
    if arguments[:1] in (["--list"], ["--help"], ["-h"]):
        print(__doc__)
        width = max(map(len, known))
        print("\n".join(f"  {name:{width}}  {purpose}" for name, purpose in known.items()))
        return 0
    if arguments and not arguments[0].startswith("-"):
        name, *options = arguments
        if name not in known:
            print(f"there is no benchmark {name!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
        return run(name, tuple(options))
    codes = [run(name, (*options, *arguments)) for name, options in SHORT.items()]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
