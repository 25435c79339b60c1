"""What a run shows while it runs. Everything that is printed goes through one console.

On a terminal long work is a live display of two lines; in a pipe it is lines that begin with the
time of day; with JSON logs each is an object on a line of its own.
"""

import io
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Literal, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from finetune.report.format import shown_time
from finetune.run.run_files import EVAL_LOSS, shown_evaluation
from offload.plan.machine.machine import GIB

Unit = Literal["bytes", "rows", "answers", "images"]
Memory = Callable[[], Mapping[str, int]]
"""Bytes by name: gpu_used, gpu_total, ram_held, ram_free; only what there is."""
Work = Callable[[int, int | None], None]
"""Is called with what is done of some work, and all of it, None if that is not known."""

NUM_RECENT_STEPS = 20
LINE_EVERY_S, LINE_AFTER_S = 5.0, 60.0
RATE_AFTER_S = 0.5  # a rate means little before
_LONG_S = 7200.0  # in hours from here on
_FEW = 10  # rows a second, which are written with decimals below it
NUM_LINES = 10  # of a piece of work, at least if it is long
SPARK_CELLS = 24
_BLOCKS = "".join(chr(0x2581 + level) for level in range(8))
_ASCII_BLOCKS = "_.-~=*#@"


class Say(Protocol):
    """Shows a line, or in JSON its fields."""

    def __call__(self, event: str, text: str, **fields: object) -> None:
        """Show it."""


class Working(Protocol):
    """Shows the progress of some work while the context lasts."""

    def __call__(self, what: str, unit: Unit, /) -> AbstractContextManager[Work]:
        """Begin the work, in words, and say what is counted."""


@contextmanager
def unseen(_what: str, _unit: Unit, /) -> Iterator[Work]:
    """Show no progress."""
    yield lambda _done, _total: None


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


class StepLines:
    """Optimizer steps without a terminal: a line from time to time, and one for the last step."""

    def __init__(
        self,
        say: Say,
        *,
        clock: Callable[[], float],
        done: int,
        total: int,
        is_each: bool = False,
        memory: Memory = dict,
    ) -> None:
        """Begin now, after `done` of `total` steps.

        Args:
            say: Shows a line.
            clock: The time, in seconds.
            done: Steps that are done.
            total: Steps of the run.
            is_each: Whether each step is shown.
            memory: What is in use.
        """
        self._say, self._clock, self._is_each = say, clock, is_each
        self._total, self._memory = total, memory
        self._last_step, self._last_s = done, clock()
        self._recent = Recent()

    def advance(self, row: Mapping[str, Any]) -> None:
        """Show a step if a minute has passed, or a tenth is done and some seconds passed."""
        self._recent.add(row)
        step, now_s = row["step"], self._clock()
        waited_s = now_s - self._last_s
        is_tenth = (step - self._last_step) * NUM_LINES >= self._total
        is_due = self._is_each or waited_s >= (LINE_EVERY_S if is_tenth else LINE_AFTER_S)
        if is_due or step == self._total:
            self._last_step, self._last_s = step, now_s
            eta_s = (self._total - step) * self._recent.step_s
            text = f"step {step}/{self._total}, {shown_step(row, self._recent, eta_s=eta_s)}"
            known = {"total_steps": self._total, "eta_s": eta_s, "memory_bytes": self._memory()}
            self._say("step", text, **(dict(row) | known))
        if EVAL_LOSS in row:
            self._say("evaluation", evaluation_line(row), step=step, eval_loss=row[EVAL_LOSS])


def shown_step(row: Mapping[str, Any], recent: Recent, *, eta_s: float) -> str:
    """Return a step's loss, the rate of the last few, and the time that is left."""
    reward = f"reward {row['reward']:.3f}, " if "reward" in row else ""
    rate = f"{recent.tokens_per_s:,.0f} tokens/s"
    return f"loss {row['loss']:.4f}, {reward}{rate}, ETA {eta_s:,.0f} s"


def evaluation_line(row: Mapping[str, Any]) -> str:
    """Return what a step's held-out rows say."""
    return f"step {row['step']}: {shown_evaluation(row)}"


class WorkLines:
    """Progress of other work without a terminal: a few lines, none for what takes no time."""

    def __init__(self, say: Say, what: str, unit: Unit, *, clock: Callable[[], float]) -> None:
        """Begin now.

        Args:
            say: Shows a line.
            what: The work in words.
            unit: What is counted.
            clock: The time, in seconds.
        """
        self._say, self._what, self._unit, self._clock = say, what, unit, clock
        self._start_s = self._last_s = clock()
        self._has_shown, self._tenth = False, 0

    def __call__(self, done: int, total: int | None) -> None:
        """Show a line if a tenth more is done, or a minute has passed.

        No two lines are within some seconds.
        """
        now_s = self._clock()
        waited_s = now_s - self._last_s
        tenth = NUM_LINES * done // total if total else 0
        is_first = total is None and not self._has_shown
        is_due = is_first or tenth > self._tenth or waited_s >= LINE_AFTER_S
        if not is_due or waited_s < LINE_EVERY_S:
            return
        self._has_shown, self._tenth, self._last_s = True, tenth, now_s
        text = shown_work(done, total, self._unit, seconds=now_s - self._start_s)
        known = {"what": self._what, "unit": self._unit, "done": done, "total": total}
        self._say("progress", f"{self._what}: {text}", **known)


def shown_work(done: int, total: int | None, unit: Unit, *, seconds: float) -> str:
    """Return how much of some work is done, how fast, and the time that is left if it is known."""
    is_in_bytes = unit == "bytes"
    numbers = [
        f"{n / GIB:.2f}" if is_in_bytes else f"{n:,}" for n in (done, total) if n is not None
    ]
    amount = f"{' of '.join(numbers)} {'GiB' if is_in_bytes else unit}"
    if seconds < RATE_AFTER_S or not done:
        return amount
    rate = done / seconds
    of_rows = f"{rate:,.0f}" if rate >= _FEW else f"{rate:.2g}"
    shown_rate = f"{rate / 1e6:,.0f} MB/s" if is_in_bytes else f"{of_rows} {unit}/s"
    if total is None:
        return f"{amount}, {shown_rate}"
    eta_s = (total - done) / rate
    eta = f"{eta_s:,.0f} s" if eta_s < _LONG_S else shown_time(eta_s)
    return f"{amount}, {shown_rate}, ETA {eta}"


def sparkline(losses: Sequence[float], *, is_ascii: bool = False) -> str:
    """Return the losses of a run in a few characters, the lowest as the lowest block.

    Args:
        losses: Of its steps; more than there are cells are averaged in groups. One that is not
            finite is `?`.
        is_ascii: Whether the terminal shows no other characters.
    """
    num_cells = min(SPARK_CELLS, len(losses))
    bounds = [len(losses) * cell // num_cells for cell in range(num_cells + 1)] if losses else []
    cells = [sum(losses[a:b]) / (b - a) for a, b in pairwise(bounds)]
    finite = [x for x in cells if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    steps_per_nat = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round(steps_per_nat * (x - low))] if math.isfinite(x) else "?" for x in cells
    )


def shown_memory(used: Mapping[str, int]) -> str:
    """Return the memory in use, of what is known."""
    parts = []
    if "gpu_used" in used:
        parts.append(f"GPU {used['gpu_used'] / GIB:.1f} of {used['gpu_total'] / GIB:.1f} GiB")
    if "ram_held" in used:
        free = f" ({used['ram_free'] / GIB:.1f} free)" if "ram_free" in used else ""
        parts.append(f"RAM {used['ram_held'] / GIB:.1f} GiB{free}")
    return ", ".join(parts)


def now() -> str:
    """Return the time of day, which begins a line that is no part of a table."""
    return time.strftime("%H:%M:%S")


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
        """Print a table or a line where the screen is verbose."""
        if self.is_verbose:
            self.show(Text(renderable) if isinstance(renderable, str) else renderable)

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
