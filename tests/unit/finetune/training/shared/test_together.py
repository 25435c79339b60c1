from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.errors import FinetuneError, RunFailedError
from finetune.training.loop import Request
from finetune.training.ranks import Ranks
from finetune.training.shared.together import Ended, Evaluated, together


class FakeEngine:
    """Notes which runs share a step, by the names that they give in place of micro-batches."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def forward_backward_runs(self, runs: Sequence[Any]) -> list[Any]:
        self.steps.append(list(runs))
        return [SimpleNamespace(timeline=None, of=run) for run in runs]


def request(name: str, number: int) -> Request:
    made: Any = f"{name}{number}"
    share: Any = None
    return Request(
        run=made, share=share, order=number, lr=0.0, name="", prepared_s=0.0, scaling=None
    )


def task(
    name: str, steps: range, *, fails: int | None = None, evaluated: Sequence[int] = ()
) -> Generator[Any, Any, str]:
    for number in steps:
        if number == fails:
            raise FinetuneError(f"{name} has failed", hint="")
        found = yield request(name, number)
        assert found.result.of == f"{name}{number}"  # its own result, whoever shared the step
        if number in evaluated:
            why = yield Evaluated(step=number + 1, loss=float(number))
            if why:
                return f"{name} {why}"
    return name


def driven(*tasks: Any, judge: Any = lambda _: {}) -> tuple[list[list[str]], list[Ended[str]]]:
    engine: Any = FakeEngine()
    ended = list(together(engine, tasks, ranks=Ranks(), judge=judge))
    return engine.steps, ended


def test_a_run_that_ends_leaves_and_the_others_go_on() -> None:
    steps, ended = driven(task("a", range(3)), task("b", range(1)))
    assert steps == [["a0", "b0"], ["a1"], ["a2"]]
    assert [(one.number, one.result, one.num_left) for one in ended] == [(1, "b", 1), (0, "a", 0)]


def test_a_run_that_fails_leaves_with_its_error() -> None:
    steps, ended = driven(task("a", range(3), fails=1), task("b", range(3)))
    assert steps == [["a0", "b0"], ["b1"], ["b2"]]
    assert str(ended[0].error).startswith("a has failed")
    with pytest.raises(FinetuneError, match="a has failed"):
        ended[0].value()
    assert ended[1].value() == "b"


def test_a_run_that_is_further_waits_for_the_others() -> None:
    steps, _ = driven(task("a", range(2, 4)), task("b", range(4)))
    assert steps == [["b0"], ["b1"], ["a2", "b2"], ["a3", "b3"]]


def test_losses_of_a_step_are_judged_together_once_all_runs_are_there() -> None:
    seen: list[dict[int, float]] = []

    def judge(losses: Mapping[int, Evaluated]) -> Mapping[int, str]:
        seen.append({number: one.loss for number, one in losses.items()})
        return {1: "is worse"} if len(losses) == 2 else {}

    def resumed() -> Generator[Any, Any, str]:
        assert not (yield Evaluated(step=2, loss=7.0))  # it was evaluated before it was killed
        return (yield from task("a", range(2, 4)))

    steps, ended = driven(resumed(), task("b", range(4), evaluated=[1]), judge=judge_first(judge))
    assert seen == [{0: 7.0, 1: 1.0}]
    assert steps == [["b0"], ["b1"], ["a2"], ["a3"]]
    assert ended[0].result == "b is worse"


def judge_first(judge: Any) -> Any:
    """Pass the judge's verdicts on, but never for the run that is numbered 0."""
    return lambda losses: {k: v for k, v in judge(losses).items() if k}


def test_a_failure_of_the_engine_ends_all_runs() -> None:
    closed: list[str] = []

    def noted(name: str) -> Generator[Any, Any, str]:
        try:
            return (yield from task(name, range(3)))
        finally:
            closed.append(name)

    class Broken(FakeEngine):
        def forward_backward_runs(self, runs: Sequence[Any]) -> list[Any]:
            raise FinetuneError("the device is gone", hint="")

    engine: Any = Broken()
    with pytest.raises(FinetuneError, match="the device is gone"):
        list(together(engine, [noted("a"), noted("b")], ranks=Ranks()))
    assert closed == ["a", "b"]


def test_a_failure_that_other_ranks_do_not_know_is_everybodys() -> None:
    class Several(Ranks):
        run_errors = (RunFailedError,)

    engine: Any = FakeEngine()
    tasks = [task("a", range(3), fails=1), task("b", range(3))]
    with pytest.raises(FinetuneError, match="a has failed"):
        list(together(engine, tasks, ranks=Several()))
