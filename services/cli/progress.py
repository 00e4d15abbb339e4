"""A progress bar on stderr where a person waits; one line per stage where nobody looks."""

from __future__ import annotations

from types import TracebackType

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from services.cli import console


class Bar:
    """Shows how much is done of one stage after another, in bytes or another unit. Invisible until the first update."""

    def __init__(self, unit: str = "bytes") -> None:
        self._bytes = unit == "bytes"
        self._unit = unit
        self._progress: Progress | None = None
        self._stage = ""
        self._task = TaskID(0)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` of the stage `what`."""
        if not console.err().is_terminal:
            if what != self._stage:
                size = console.size(total) if self._bytes else f"{total:,} {self._unit}"
                amount = f" ({size})" if total > 1 else ""
                console.err().print(f"{what}{amount}", highlight=False, markup=False)
                self._stage = what
            return
        if self._progress is None:
            amount_column = DownloadColumn() if self._bytes else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), amount_column, TimeRemainingColumn())
            self._progress = Progress(*columns, console=console.err(), transient=True)
            self._progress.start()
        if what != self._stage:
            self._stage = what
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total)
