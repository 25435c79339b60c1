"""What is shown of runs that train together: a line for each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from finetune.report.screen import Recent, Screen, Steps
from finetune.run.evaluations import EVAL_LOSS


class Board:
    """A line per run, on a terminal, while any of them trains."""

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self._console = console
        self._progress: Progress | None = None
        self._num_open = 0

    @contextmanager
    def row(self, name: str, *, done: int, total: int) -> Iterator["BoardRow"]:
        """Show a run while it trains; its line stays until the last one has ended."""
        if self._progress is None:
            self._progress = _progress(self._console)
            self._progress.start()
        self._num_open += 1
        task = self._progress.add_task(
            "", total=total, completed=done, name=name, loss="-", held_out="-", rate="-"
        )
        try:
            yield BoardRow(self._progress, task)
        finally:
            self._num_open -= 1
            self._progress.stop_task(task)
            if not self._num_open:
                self._progress.stop()
                self._progress = None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[name]}", markup=False),
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("held-out {task.fields[held_out]}"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )


class BoardRow:
    """The line of a run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Keep the line."""
        self._progress, self._task = progress, task
        self._recent = Recent()

    def advance(self, row: Mapping[str, Any]) -> None:
        """Show that a step is done, and the loss on held-out rows if there is one."""
        self._recent.add(row)
        shown: dict[str, Any] = {
            "loss": f"{row['loss']:.4f}",
            "rate": f"{self._recent.tokens_per_s:,.0f}",
        }
        if EVAL_LOSS in row:
            shown["held_out"] = f"{row[EVAL_LOSS]:.4f}"
        self._progress.update(self._task, advance=1, **shown)


class RunScreen(Screen):
    """The screen of one of several runs: what it prints begins with its name."""

    def __init__(self, console: Console, board: Board, *, name: str, is_verbose: bool) -> None:
        """Write to this console, and to a line of this board."""
        super().__init__(console, is_verbose=is_verbose)
        self._board, self._name = board, name

    def show(self, renderable: RenderableType) -> None:
        """Print a table of the run if the screen is verbose; it is in the run's report."""
        if self.is_verbose:
            self.note("")
            super().show(renderable)

    def note(self, text: str) -> None:
        """Print a line of plain text."""
        super().note(f"{self._name}: {text}")

    @contextmanager
    def steps(self, *, done: int, total: int) -> Iterator[Steps]:
        """Show a line of the board, or lines without a terminal."""
        if not self.console.is_terminal:
            with super().steps(done=done, total=total) as lines:
                yield lines
            return
        with self._board.row(self._name, done=done, total=total) as row:
            yield row
