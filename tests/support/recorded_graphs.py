"""CUDA graphs without a GPU: what is called during a capture is written down, and replayed on the same memory.

As a real graph, a recorded one knows only addresses: memory that was allocated before the capture and is gone when it
is replayed is an error here, where on a GPU it would be another tenant's bytes. So is looking at values meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels.dispatch import Ops
from shared.models import graphs

_WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten.masked_select")


class _Outside(NamedTuple):
    """A tensor over memory that the graph does not own."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        assert not self.storage.expired(), "the graph reads memory that has been freed since it was captured"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: dict[int, torch.Tensor]
    """Memory of the graph's own, by place among all tensors of the result."""


class RecordedGraph(TorchDispatchMode):
    """`torch.cuda.CUDAGraph`, filled by `capture`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._inside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not name.startswith(_WAITS), f"{name} waits for the device while capturing"
        return self.record(func, args, kwargs or {})

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `function` and remembers it."""
        kept = self._kept(args), self._kept(kwargs)
        with _disable_current_modes():
            found = function(*args, **kwargs)
        given = {_key(tensor) for tensor in _tensors((args, kwargs))}
        results = _tensors(found)
        self._inside.update(_key(tensor) for tensor in results if _key(tensor) not in given)
        own = {at: tensor for at, tensor in enumerate(results) if _key(tensor) in self._inside}
        self._calls.append(_Call(function, *kept, own))
        return found

    def replay(self) -> None:
        for call in self._calls:
            found = _tensors(call.function(*_thawed(call.args), **_thawed(call.kwargs)))
            for at, tensor in call.results.items():
                if _key(tensor) != _key(found[at]):
                    tensor.copy_(found[at])

    def _kept(self, value: Any) -> Any:
        def keep(tensor: torch.Tensor) -> Any:
            if _key(tensor) in self._inside:
                return tensor
            storage = StorageWeakRef(tensor.untyped_storage())
            return _Outside(storage, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

        return _mapped(value, torch.Tensor, keep)


class Capture:
    """`torch.cuda.graph`."""

    current: RecordedGraph | None = None

    def __init__(self, graph: RecordedGraph, **options: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        Capture.current = self._graph
        self._graph.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._graph.__exit__(kind, error, trace)
        Capture.current = None


class RecordedOps(Ops):
    """Ops whose calls are one node of a graph each: in the interpreter a kernel is no operation of torch."""

    def __getattr__(self, op: str) -> Callable[..., Any]:
        plain = super().__getattr__(op)

        def call(*args: Any, **kwargs: Any) -> Any:
            graph = Capture.current
            return plain(*args, **kwargs) if graph is None else graph.record(plain, args, kwargs)

        setattr(self, op, call)
        return call


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `DecodeGraphs` work on the CPU."""

    class Stream:
        def wait_stream(self, other: Any) -> None:
            return

    for name, stand_in in {
        "CUDAGraph": RecordedGraph, "graph": Capture, "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: Stream(), "current_stream": lambda device: Stream(), "stream": nullcontext,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "page_locked", lambda size: torch.zeros(size, dtype=torch.int32))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(value, torch.Tensor, found.append)
    return found


def _thawed(value: Any) -> Any:
    return _mapped(value, _Outside, _Outside.tensor)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with everything of `kind` in it changed; looks into tuples, lists, dicts and dataclasses with tensors."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, kind, change) for key, one in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, _Outside | torch.Size):
        return type(value)(_mapped(one, kind, change) for one in value)
    if type(value).__module__ == "kernels.attention":
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = object.__new__(type(value))
        for name, one in fields.items():
            object.__setattr__(changed, name, _mapped(one, kind, change))
        return changed
    return value
