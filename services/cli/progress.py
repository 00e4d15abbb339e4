"""A progress bar on stderr where a person waits; one line per stage where nobody looks."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from services.cli import console


class Bar:
    """Shows bytes done of one stage after another. Invisible until the first update."""

    def __init__(self) -> None:
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
        """`done` of `total` bytes of the stage `what`."""
        if not console.err().is_terminal:
            if what != self._stage:
                amount = f" ({console.size(total)})" if total > 1 else ""
                console.err().print(f"{what}{amount}", highlight=False, markup=False)
                self._stage = what
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console.err(), transient=True)
            self._progress.start()
        if what != self._stage:
            self._stage = what
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total)
