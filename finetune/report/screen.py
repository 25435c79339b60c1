"""What a run shows while it runs. Everything that is printed goes through one console.

On a terminal long work is a live display of two lines; in a pipe it is lines that begin with the
time of day; with JSON logs each is an object on a line of its own.
"""

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from finetune.report.progress import (
    Memory,
    Recent,
    StepLines,
    Steps,
    Unit,
    Work,
    WorkLines,
    evaluation_line,
    now,
    shown_memory,
    shown_step,
    shown_work,
    sparkline,
)
from finetune.run.evaluations import EVAL_LOSS

Form = Literal["text", "json"]
JSON_COLUMNS = 120  # of a table within an object
_NARROW, _BAR, _SHORT_BAR = 100, 20, 10
_SHORT_NAME = 20  # leaves room for what is said


class Bars(Progress):
    """Bars with a text each, and below them a line on the run as a whole."""

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self.below = ""
        is_narrow = console.width < _NARROW
        name = Column(no_wrap=True, max_width=_SHORT_NAME if is_narrow else None)
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=_SHORT_BAR if is_narrow else _BAR),
            TextColumn("{task.fields[said]}", markup=False),
            console=console,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bars, and the line if there is one."""
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, no_wrap=True, overflow="ellipsis")


class StepBar:
    """A bar over optimizer steps with their losses; an evaluation is a line above it."""

    def __init__(
        self, bars: Bars, task: TaskID, note: Callable[[str], None], memory: Memory, *, total: int
    ) -> None:
        """Keep the bar."""
        self._bars, self._task, self._note, self._memory = bars, task, note, memory
        self._total, self._recent, self._losses = total, Recent(), list[float]()

    def advance(self, row: Mapping[str, Any]) -> None:
        """Show that a step is done, the rate of the last few, and the losses so far."""
        self._recent.add(row)
        self._losses.append(row["loss"])
        eta_s = (self._total - row["step"]) * self._recent.step_s
        is_ascii = not self._bars.console.encoding.startswith("utf")
        losses = sparkline(self._losses, is_ascii=is_ascii)
        self._bars.below = "  ".join(filter(None, (losses, shown_memory(self._memory()))))
        self._bars.update(
            self._task,
            completed=row["step"],
            description=f"step {row['step']}/{self._total}",
            said=shown_step(row, self._recent, eta_s=eta_s),
        )
        if EVAL_LOSS in row:
            self._note(evaluation_line(row))


class Screen:
    """A console, and what is live on it."""

    def __init__(self, console: Console, *, is_verbose: bool, form: Form = "text") -> None:
        """Write to a console.

        Args:
            console: It; a quiet one shows nothing.
            is_verbose: Whether details are shown too.
            form: Lines and tables for people, or an object a line.
        """
        self.console = console
        self.is_verbose = is_verbose
        self.form = form
        self._bars: Bars | None = None

    @property
    def is_live(self) -> bool:
        """Whether bars are shown, and not lines."""
        return self.console.is_terminal and self.form == "text"

    def show(self, renderable: RenderableType) -> None:
        """Print a table or a text."""
        if self.form == "text":
            self.console.print(renderable)
            return
        text = io.StringIO()
        Console(file=text, width=JSON_COLUMNS, highlight=False).print(renderable)
        self._object("table", text.getvalue().rstrip())

    def detail(self, renderable: RenderableType) -> None:
        """Print a table or a text where the screen is verbose."""
        if self.is_verbose:
            self.show(renderable)

    def note(self, text: str) -> None:
        """Print a line of plain text, brackets and all."""
        if self.form == "json":
            self._object("note", text)
        else:
            self.console.print(text, markup=False, highlight=False)

    def say(self, event: str, text: str, **fields: object) -> None:
        """Print a line of progress, with the time."""
        if self.form == "json":
            self._object(event, text, **fields)
        else:
            self.note(f"{now()} {text}")

    def _object(self, event: str, text: str, **fields: object) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": at, "event": event, **self._owner(), "text": text, **fields})
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _owner(self) -> Mapping[str, str]:
        """Return what else an object holds: of which run it is, where there are several."""
        return {}

    @contextmanager
    def working(self, what: str, unit: Unit) -> Iterator[Work]:
        """Show the progress of some work; call the yielded function with what is done, and all.

        Where all is not known the bar moves to and fro.

        Args:
            what: The work in words.
            unit: What is counted.
        """
        if not self.is_live:
            yield WorkLines(self.say, what, unit, clock=time.perf_counter)
            return
        with self._live() as bars:
            task = bars.add_task(what, total=None, visible=False, said="")
            start_s = time.perf_counter()

            def show(done: int, total: int | None) -> None:
                said = shown_work(done, total, unit, seconds=time.perf_counter() - start_s)
                is_first = not bars.tasks[bars.task_ids.index(task)].visible
                bars.update(
                    task, completed=done, total=total, said=said, visible=True, refresh=is_first
                )

            yield show
            bars.update(task, total=bars.tasks[bars.task_ids.index(task)].completed)
            if len(bars.tasks) > 1:  # of steps that go on
                bars.remove_task(task)

    @contextmanager
    def steps(self, *, done: int, total: int, memory: Memory = dict) -> Iterator[Steps]:
        """Show optimizer steps: their loss, tokens/s, the time that is left, and memory.

        Args:
            done: Steps that are done.
            total: Steps of the run.
            memory: What is in use.
        """
        if not self.is_live:
            yield StepLines(
                self.say,
                clock=time.perf_counter,
                done=done,
                total=total,
                is_each=self.form == "json",
                memory=memory,
            )
            return
        with self._live() as bars:
            task = bars.add_task(f"step {done}/{total}", total=total, completed=done, said="")
            yield StepBar(bars, task, self.note, memory, total=total)

    @contextmanager
    def _live(self) -> Iterator[Bars]:
        """Yield the bars that are shown, or new ones while the context lasts."""
        if self._bars is not None:
            yield self._bars
            return
        self._bars = Bars(self.console)
        try:
            with self._bars:
                yield self._bars
        finally:
            self._bars = None
