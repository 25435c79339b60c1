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

from finetune.report.screen import Form, Memory, Recent, Screen, Steps, Unit, Work, now, unseen
from finetune.run.run_files import EVAL_LOSS


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

    def __init__(
        self, console: Console, board: Board, *, name: str, is_verbose: bool, form: Form
    ) -> None:
        """Write to this console, and to a line of this board."""
        super().__init__(console, is_verbose=is_verbose, form=form)
        self._board, self._name = board, name

    def show(self, renderable: RenderableType) -> None:
        """Print a table of the run if the screen is verbose; it is in the run's report."""
        if self.is_verbose:
            if self.form == "text":
                self.note("")
            super().show(renderable)

    def note(self, text: str) -> None:
        """Print a line of plain text."""
        super().note(text if self.form == "json" else f"{self._name}: {text}")

    def say(self, event: str, text: str, **fields: object) -> None:
        """Print a line of progress, with the time and the run's name."""
        if self.form == "json":
            super().say(event, text, **fields)
        else:
            Screen.note(self, f"{now()} {self._name}: {text}")

    def _owner(self) -> Mapping[str, str]:
        return {"run": self._name}

    @contextmanager
    def working(self, what: str, unit: Unit) -> Iterator[Work]:
        """Show the progress of some work as lines; on a terminal the board shows what it gives."""
        shown = unseen if self.is_live else super().working
        with shown(what, unit) as progress:
            yield progress

    @contextmanager
    def steps(self, *, done: int, total: int, memory: Memory = dict) -> Iterator[Steps]:
        """Show a line of the board, or lines without a terminal."""
        if not self.is_live:
            with super().steps(done=done, total=total, memory=memory) as lines:
                yield lines
            return
        with self._board.row(self._name, done=done, total=total) as row:
            yield row
