"""Several runs over one stream of the base: each asks for its steps, and all are computed at once.

A run is a generator. It yields the steps that it wants computed and is sent what the engine found;
between two steps it updates its weights, evaluates itself and writes its files, as if it were
alone. All runs that ask for the same step share one pass over the layers and back. A run that is
further than others, as after a kill, waits for them: so what a step is compared with is the same
whether or not the runs were interrupted.

A run that ends, or fails, leaves; the others go on. A failure of the engine is everybody's, and so
is one that only some ranks of the run know of.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from finetune.training.loop import Computed, Request, StepEngine, computed
from finetune.training.ranks import Ranks
from offload.errors import SluiceError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A run's loss on held-out rows, which it waits to be compared with that of others.

    Attributes:
        step: After how many steps; the next has this number, as steps are counted from 0.
        loss: The loss.
    """

    step: int
    loss: float


Answer = Computed | str | None
Task = Generator[Request | Evaluated, Any, T]
"""Yields what it waits for: a request is answered by `Computed`, a loss by why to stop, or None."""

Judge = Callable[[Mapping[int, Evaluated]], Mapping[int, str]]
"""Takes losses of runs after the same step, by number of the run; returns why which are to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Generic[T]):
    """How a run left.

    Attributes:
        number: Of the run.
        result: What it returned; None if it failed.
        error: Why it failed; None if it did not.
        num_left: Runs that go on.
    """

    number: int
    result: T | None
    error: SluiceError | OSError | None
    num_left: int

    def value(self) -> T:
        """Return what the run returned, or raise what it failed with."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def judged_alone(_losses: Mapping[int, Evaluated]) -> Mapping[int, str]:
    """Let all runs go on."""
    return {}


def together(
    engine: StepEngine, tasks: "Sequence[Task[T]]", *, ranks: Ranks, judge: Judge = judged_alone
) -> "Iterator[Ended[T]]":
    """Drive runs that share an engine; yield each when it leaves.

    Args:
        engine: Computes their steps.
        tasks: The runs.
        ranks: The processes that all of them share.
        judge: Which runs are to stop after an evaluation.

    Raises:
        SluiceError: The engine has failed.
    """
    asked: dict[int, Request | Evaluated] = {}
    answers: dict[int, Answer] = dict.fromkeys(range(len(tasks)))
    live = set(answers)
    try:
        while live:
            for number, answer in answers.items():
                try:
                    asked[number] = tasks[number].send(answer)
                except StopIteration as end:
                    live.remove(number)
                    yield Ended(number=number, result=end.value, error=None, num_left=len(live))
                except ranks.run_errors as error:
                    live.remove(number)
                    yield Ended(number=number, result=None, error=error, num_left=len(live))
            answers = _answered(engine, asked, judge) if live else {}
            for number in answers:
                del asked[number]
    finally:
        for task in tasks:
            task.close()


def _answered(
    engine: StepEngine, asked: Mapping[int, Request | Evaluated], judge: Judge
) -> dict[int, Answer]:
    """Compute the steps that are due first; losses are judged once no run is before their step."""
    losses = {number: one for number, one in asked.items() if isinstance(one, Evaluated)}
    requests = {number: one for number, one in asked.items() if isinstance(one, Request)}
    first_request = min((one.order for one in requests.values()), default=math.inf)
    first_loss = min((one.step for one in losses.values()), default=math.inf)
    if first_loss <= first_request:
        due = {number: one for number, one in losses.items() if one.step == first_loss}
        verdicts = judge(due)
        return {number: verdicts.get(number) for number in due}
    now = {number: one for number, one in requests.items() if one.order == first_request}
    found = computed(engine, list(now.values()))
    return dict(zip(now, found, strict=True))
