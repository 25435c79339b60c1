"""What a run shows while it runs. Everything that is printed goes through one console."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

NUM_RECENT_STEPS = 20


class StepBar:
    """A progress bar over optimizer steps."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Keep the bar."""
        self._progress = progress
        self._task = task
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT_STEPS)

    def advance(self, *, loss: float, num_tokens: int, seconds: float) -> None:
        """Show that a step is done, and the rate of the last few."""
        self._recent.append((num_tokens, seconds))
        tokens, spent_s = (sum(column) for column in zip(*self._recent, strict=True))
        self._progress.update(
            self._task, advance=1, loss=f"{loss:.4f}", rate=f"{tokens / spent_s:,.0f}"
        )


class Screen:
    """A console, and the bars on it."""

    def __init__(self, console: Console) -> None:
        """Write to this console."""
        self.console = console

    def show(self, renderable: RenderableType) -> None:
        """Print a table or a text."""
        self.console.print(renderable)

    def note(self, text: str) -> None:
        """Print a line of plain text, brackets and all."""
        self.console.print(text, markup=False, highlight=False)

    @contextmanager
    def steps(self, *, done: int, total: int) -> Iterator[StepBar]:
        """Show a bar with loss, tokens/s and the time that is left."""
        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
        )
        with progress:
            task = progress.add_task("", total=total, completed=done, loss="-", rate="-")
            yield StepBar(progress, task)
