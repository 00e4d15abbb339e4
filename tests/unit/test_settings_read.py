"""Every setting an actor's class has is read in that actor's own code, or in what it imports of `shared`.

A setting that nobody reads changes nothing; one that is read by other actors only changes nothing in this one's table.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from services.cli.options import KINDS
from tests.unit.test_layout import ROOT, imports

HOLDERS = {"settings", "chosen"}
"""What code calls an actor's settings: `settings.x`, `self.settings.x`, `chosen.x`."""


@functools.cache
def reads(path: Path) -> frozenset[str]:
    """Names of settings that a file reads."""
    return frozenset(_reads(ast.parse(path.read_text(), str(path))))


def _reads(tree: ast.AST) -> Iterator[str]:
    """Attributes of a holder, and the pool that a worker names as its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node.value) in HOLDERS:
            yield node.attr
        elif isinstance(node, ast.Assign) and [_name(target) for target in node.targets] == ["pool_setting"]:
            assert isinstance(node.value, ast.Constant)
            yield str(node.value.value)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def code_of(actor: str) -> set[Path]:
    """The files of an actor and all of `shared` that they import, however far away."""
    found, waiting = set[Path](), [*(ROOT / "services" / actor).rglob("*.py")]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _needs(path)
    return found


@functools.cache
def _needs(path: Path) -> list[Path]:
    """The files of `shared` that one file imports."""
    stems = [ROOT.joinpath(*name.split(".")) for name, _ in imports(path) if name.startswith("shared.")]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py")]
    return [file for file in files if file.exists()]


def unread(actor: str, names: Iterable[str]) -> set[str]:
    """Those of `names` that the actor reads nowhere."""
    return set(names).difference(*(reads(path) for path in code_of(actor)))


@pytest.mark.parametrize("actor", sorted(KINDS))
def test_every_setting_of_an_actor_is_read_there(actor: str) -> None:
    assert unread(actor, KINDS[actor].model_fields) == set()


def test_settings_of_others_would_be_noticed() -> None:
    assert unread("decode", ["max_num_batched_tokens", "num_blocks_override", "prefill_pool", "decode_pool"]) == {
        "max_num_batched_tokens", "num_blocks_override", "prefill_pool",
    }  # fmt: skip
    assert unread("prefill", ["max_num_seqs", "threads", "queue_size"]) == {"max_num_seqs", "queue_size"}
    assert unread("gateway", ["enable_prefix_caching", "max_num_seqs", "block_size"]) == {
        "enable_prefix_caching", "max_num_seqs",
    }  # fmt: skip
    assert unread("offload", ["model", "prefill_pool", "log_level"]) == {"model"}
