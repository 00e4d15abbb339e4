"""The architecture as import rules: kernels ← shared ← services, services apart, pure modules pure, one publisher."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "shared", "services", "infra")
ACTORS = ("gateway", "prefill", "decode", "block_manager", "offload")

# files and folders of services/<actor>/ that may touch the event loop; everything else there is pure logic
SHELLS = {"__main__", "actor", "engine", "http"}
# the life of a request is written as coroutines there; what these decide with is in the pure files beside them
COROUTINES = {
    f"services/gateway/{stem}.py" for stem in ("dispatch", "live", "output", "placement", "recall", "service")
}
# modules outside services/ that must stay importable without an event loop, NATS or a compute library
PURE = ("shared/errors.py", "shared/handles.py", "shared/messages", "shared/prefix.py", "kernels/layout.py")
IMPURE = {"asyncio", "nats", "torch"}


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that `path` imports, anywhere in it, with their lines."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def offenders(paths: list[Path], forbidden: object) -> list[str]:
    """`file:line imports name` for every import for which `forbidden(path, name)` holds."""
    assert callable(forbidden)
    return sorted(
        {
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for path in paths
            for name, line in imports(path)
            if forbidden(path, name)
        }
    )


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("kernels", {"kernels"}),
        ("shared", {"kernels", "shared"}),
        ("services", {"kernels", "shared", "services", "infra"}),
    ],
)
def test_packages_depend_in_one_direction(package: str, allowed: set[str]) -> None:
    ours = set(PACKAGES) | {"tests"}
    assert offenders(sources(package), lambda _, name: top(name) in ours - allowed) == []


def test_services_never_import_each_other() -> None:
    def foreign(path: Path, name: str) -> bool:
        own = path.relative_to(ROOT / "services").parts[0]
        parts = name.split(".")
        return parts[0] == "services" and len(parts) > 1 and parts[1] != own

    assert offenders(sources("services"), foreign) == []


def test_only_the_command_line_uses_infra() -> None:
    actors = [path for actor in ACTORS for path in sources(f"services/{actor}")]
    assert offenders(actors, lambda _, name: top(name) == "infra") == []


def test_pure_logic_of_actors_is_pure() -> None:
    actors = [path.relative_to(ROOT) for actor in ACTORS for path in sources(f"services/{actor}")]
    pure = [ROOT / path for path in actors if not SHELLS & set(path.with_suffix("").parts[2:])]
    loops = [ROOT / path for path in sorted(COROUTINES)]
    assert offenders([path for path in pure if path not in loops], lambda _, name: top(name) in IMPURE) == []
    assert offenders(loops, lambda _, name: top(name) in IMPURE - {"asyncio"}) == []


@pytest.mark.parametrize("module", PURE)
def test_shared_pure_modules_are_pure(module: str) -> None:
    path = ROOT / module
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert offenders(files, lambda _, name: top(name) in IMPURE) == []


def test_page_layout_needs_no_array_library() -> None:
    assert offenders([ROOT / "kernels/layout.py"], lambda _, name: top(name) == "numpy") == []


def test_only_engines_import_torch_in_services() -> None:
    others = [path for path in sources("services") if path.stem != "engine"]
    assert offenders(others, lambda _, name: top(name) == "torch") == []


def test_only_the_bus_can_publish() -> None:
    """Who has no NATS client cannot publish past the size check and the trace context; types of messages do no harm."""
    others = [path for path in sources(*PACKAGES) if path not in sorted((ROOT / "shared").glob("bus*.py"))]
    harmless = ("nats.aio.msg", "nats.aio.subscription")
    assert offenders(others, lambda _, name: top(name) == "nats" and not name.startswith(harmless)) == []
    answering = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in others
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("respond", "respond_msg")
    ]
    assert answering == [], "Msg.respond() echoes the request's headers and knows no trace"


def test_the_application_never_imports_transformers() -> None:
    assert offenders(sources("kernels", "shared", "services"), lambda _, name: top(name) == "transformers") == []


def test_the_kernels_package_imports_nothing() -> None:
    """Another distribution of that name exists; libraries that probe for it must find a version and no side effects."""
    module = ROOT / "kernels/__init__.py"
    assert list(imports(module)) == []
    assert '__version__ = "0.0.0"' in module.read_text()


@pytest.mark.parametrize("actor", ACTORS)
def test_every_actor_has_its_two_files(actor: str) -> None:
    for name in ("__main__.py", "actor.py"):
        assert (ROOT / "services" / actor / name).is_file()
