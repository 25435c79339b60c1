"""What a run shows while it runs. Everything that is printed goes through one console."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from offload.plan.machine import GIB

NUM_RECENT_STEPS = 20
LINE_EVERY_S = 5.0
NUM_LOADING_LINES = 10


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


class LoadingLines:
    """How far loading is where there is no terminal: a few lines, none of what takes no time."""

    def __init__(self, note: Callable[[str], None], *, clock: Callable[[], float]) -> None:
        """Begin now."""
        self._note, self._clock = note, clock
        self._start_s = self._last_s = clock()
        self._num_told = 0

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Print a line if a tenth more is done, and some seconds have passed."""
        now_s, num_tenths = self._clock(), NUM_LOADING_LINES * done_bytes // all_bytes
        if num_tenths <= self._num_told or now_s - self._last_s < LINE_EVERY_S:
            return
        self._num_told, self._last_s = num_tenths, now_s
        bytes_per_s = done_bytes / (now_s - self._start_s)
        self._note(
            f"Loading weights: {done_bytes / GIB:.2f} of {all_bytes / GIB:.2f} GiB,"
            f" {bytes_per_s / 1e6:,.0f} MB/s, ETA {(all_bytes - done_bytes) / bytes_per_s:,.0f} s"
        )


@contextmanager
def bytes_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes are written, and the time that is left; nothing before the first."""
    columns = (DownloadColumn(), TransferSpeedColumn(), "ETA", TimeRemainingColumn())
    with Progress(what, *columns, console=console) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


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
    def loading(self) -> Iterator[Callable[[int, int], None]]:
        """Show how far loading is: call what is yielded with the bytes done and all bytes."""
        if not self.console.is_terminal:
            yield LoadingLines(self.note, clock=time.perf_counter)
            return
        progress = Progress(
            TextColumn("Loading weights"),
            DownloadColumn(binary_units=True),
            BarColumn(),
            TransferSpeedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
        )
        with progress:
            task = progress.add_task("", visible=False)

            def show(done_bytes: int, all_bytes: int) -> None:
                progress.update(task, completed=done_bytes, total=all_bytes, visible=True)

            yield show

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
