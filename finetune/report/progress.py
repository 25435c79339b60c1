"""Progress of long work: what is said of it, and when a line is due where there is no terminal."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, Literal, Protocol

from finetune.run.evaluations import EVAL_LOSS, shown_evaluation
from offload.plan.machine.machine import GIB

Unit = Literal["bytes", "rows"]
Memory = Callable[[], Mapping[str, int]]
"""Bytes by name: gpu_used, gpu_total, ram_held, ram_free; only what there is."""
Work = Callable[[int, int | None], None]
"""Is called with what is done of some work, and all of it, None if that is not known."""

NUM_RECENT_STEPS = 20
LINE_EVERY_S, LINE_AFTER_S = 5.0, 60.0
RATE_AFTER_S = 0.5  # a rate means little before
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
    return f"loss {row['loss']:.4f}, {recent.tokens_per_s:,.0f} tokens/s, ETA {eta_s:,.0f} s"


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
    amount = f"{' of '.join(numbers)} {'GiB' if is_in_bytes else 'rows'}"
    if seconds < RATE_AFTER_S or not done:
        return amount
    rate = done / seconds
    shown_rate = f"{rate / 1e6:,.0f} MB/s" if is_in_bytes else f"{rate:,.0f} rows/s"
    eta = "" if total is None else f", ETA {(total - done) / rate:,.0f} s"
    return f"{amount}, {shown_rate}{eta}"


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
