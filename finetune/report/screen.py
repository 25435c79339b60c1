"""What a run shows while it runs. Everything that is printed goes through one console."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

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

from finetune.run.evaluations import EVAL_LOSS, shown_evaluation
from offload.plan.machine.machine import GIB

NUM_RECENT_STEPS = 20
LINE_EVERY_S, LINE_AFTER_S = 5.0, 60.0
NUM_STEP_LINES = 10
NUM_LOADING_LINES = 10


class Steps(Protocol):
    """Optimizer steps as they are shown."""

    def advance(self, row: Mapping[str, Any]) -> None:
        """Show that a step is done, by its row of metrics, and the loss on held-out rows in it."""


class Recent:
    """The rate of the last few steps."""

    def __init__(self) -> None:
        """Begin with none."""
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT_STEPS)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a step, with its wait for data."""
        self._steps.append((row["num_tokens"], row["num_tokens"] / row["tokens_per_s"]))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a second."""
        return sum(tokens for tokens, _ in self._steps) / sum(s for _, s in self._steps)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(seconds for _, seconds in self._steps) / len(self._steps)


class StepBar:
    """A progress bar over optimizer steps; a loss on held-out rows is a line above it."""

    def __init__(self, progress: Progress, task: TaskID, note: Callable[[str], None]) -> None:
        """Keep the bar."""
        self._progress = progress
        self._task = task
        self._note = note
        self._recent = Recent()

    def advance(self, row: Mapping[str, Any]) -> None:
        """Show that a step is done, and the rate of the last few."""
        self._recent.add(row)
        rate = f"{self._recent.tokens_per_s:,.0f}"
        self._progress.update(self._task, advance=1, loss=f"{row['loss']:.4f}", rate=rate)
        if EVAL_LOSS in row:
            self._note(_evaluation(row))


class StepLines:
    """Optimizer steps without a terminal: a line from time to time, and one for the last step."""

    def __init__(
        self, note: Callable[[str], None], *, clock: Callable[[], float], done: int, total: int
    ) -> None:
        """Begin now, after `done` of `total` steps."""
        self._note, self._clock = note, clock
        self._total = total
        self._last_step, self._last_s = done, clock()
        self._recent = Recent()

    def advance(self, row: Mapping[str, Any]) -> None:
        """Print a line if a minute has passed, or a tenth is done and some seconds passed."""
        self._recent.add(row)
        step, now_s = row["step"], self._clock()
        waited_s = now_s - self._last_s
        is_tenth = (step - self._last_step) * NUM_STEP_LINES >= self._total
        is_due = waited_s >= (LINE_EVERY_S if is_tenth else LINE_AFTER_S)
        if is_due or step == self._total:
            self._last_step, self._last_s = step, now_s
            self._note(
                f"step {step}/{self._total}, loss {row['loss']:.4f},"
                f" {self._recent.tokens_per_s:,.0f} tokens/s,"
                f" ETA {(self._total - step) * self._recent.step_s:,.0f} s"
            )
        if EVAL_LOSS in row:
            self._note(_evaluation(row))


def _evaluation(row: Mapping[str, Any]) -> str:
    return f"step {row['step']}: {shown_evaluation(row)}"


class LoadingLines:
    """Progress of loading without a terminal: a few lines, none for what takes no time."""

    def __init__(self, note: Callable[[str], None], *, clock: Callable[[], float]) -> None:
        """Begin now."""
        self._note, self._clock = note, clock
        self._start_s = self._last_s = clock()
        self._num_shown = 0

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Print a line if a tenth more is done, and some seconds have passed."""
        now_s, num_tenths = self._clock(), NUM_LOADING_LINES * done_bytes // all_bytes
        if num_tenths <= self._num_shown or now_s - self._last_s < LINE_EVERY_S:
            return
        self._num_shown, self._last_s = num_tenths, now_s
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

    def __init__(self, console: Console, *, is_verbose: bool) -> None:
        """Write to this console, details too if it is verbose."""
        self.console = console
        self.is_verbose = is_verbose

    def show(self, renderable: RenderableType) -> None:
        """Print a table or a text."""
        self.console.print(renderable)

    def detail(self, renderable: RenderableType) -> None:
        """Print a table or a text where the screen is verbose."""
        if self.is_verbose:
            self.show(renderable)

    def note(self, text: str) -> None:
        """Print a line of plain text, brackets and all."""
        self.console.print(text, markup=False, highlight=False)

    @contextmanager
    def loading(self) -> Iterator[Callable[[int, int], None]]:
        """Show the progress of loading; call the yielded function with bytes done and in total."""
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
    def steps(self, *, done: int, total: int) -> Iterator[Steps]:
        """Show a bar with loss, tokens/s and the time that is left, or lines without a terminal."""
        if not self.console.is_terminal:
            yield StepLines(self.note, clock=time.perf_counter, done=done, total=total)
            return
        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
        )
        with progress:
            task = progress.add_task("", total=total, completed=done, loss="-", rate="-")
            yield StepBar(progress, task, self.note)
