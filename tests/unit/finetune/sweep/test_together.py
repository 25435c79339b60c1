from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.errors import FinetuneError, RunFailedError
from finetune.sweep import together
from finetune.training.ranks import Ranks
from finetune.training.run import Outcome


class FakeEngine:
    """Notes which runs share a step, by the names that they give in place of requests."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def forward_backward_runs(self, runs: Sequence[str]) -> list[Any]:
        self.steps.append(list(runs))
        return [SimpleNamespace(timeline=None, of=run) for run in runs]


class FakeLog:
    """The steps of a run, of which one may fail, and some are evaluated."""

    def __init__(self, steps: range, *, fails: int | None, evaluated: Sequence[int]) -> None:
        self._steps, self._fails, self._evaluated = steps, fails, evaluated
        self.num_steps, self.outcome = steps.start, None if steps else outcome(steps.start)
        self.loss = 7.0 if steps.start in evaluated else None

    def batches(self) -> Iterator[Any]:
        for number in self._steps:
            if number == self._fails:
                raise FinetuneError("it has failed", hint="")
            yield SimpleNamespace(step=number, share=None)

    def watching(self, _batch: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, _batch: Any, _record: str) -> None:
        self.num_steps += 1
        self.loss = float(self.num_steps) if self.num_steps in self._evaluated else None

    def close_step(self, _record: str, _received: Any, *, stopped: str | None = None) -> None:
        if stopped:
            self.stop(stopped)
        elif self.num_steps == self._steps.stop:
            self.outcome = outcome(self.num_steps)

    def stop(self, why: str) -> None:
        self.outcome = outcome(self.num_steps, stopped=why)


def outcome(num_steps: int, **how: str) -> Outcome:
    return Outcome(run_dir=Path(), num_steps=num_steps, stopped=how.get("stopped"))


class Scene:
    """Runs that train together on a fake engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.finished: list[str] = []
        self.closed: list[str] = []
        self.ranks = Ranks()
        monkeypatch.setattr(together, "step_log", self._opened)
        monkeypatch.setattr(together, "finish", lambda session: self.finished.append(session.name))

    @contextmanager
    def _opened(self, session: Any, _plan: object) -> Iterator[Any]:
        yield session.log
        self.closed.append(session.name)

    def run(
        self, name: str, steps: range, *, fails: int | None = None, evaluated: Sequence[int] = ()
    ) -> Any:
        def complete(request: Any, found: Any) -> str:
            assert found.result.of == request.run  # its own result, whoever shared the step
            return name

        checkpoints = SimpleNamespace(newest=lambda: None)
        folder = SimpleNamespace(path=Path(), checkpoints=checkpoints)
        return SimpleNamespace(
            name=name,
            engine=self.engine,
            run=SimpleNamespace(ranks=self.ranks, dir=folder),
            log=FakeLog(steps, fails=fails, evaluated=evaluated),
            loop=SimpleNamespace(
                request=lambda number, _share: SimpleNamespace(run=f"{name}{number}"),
                complete=complete,
            ),
        )

    def train(self, *runs: Any, judge: Any = lambda *_: {}) -> list[Outcome]:
        plan: Any = None
        return together._trained(runs, plan, judge)


def test_a_run_that_ends_leaves_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    ended = scene.train(scene.run("a", range(3)), scene.run("b", range(1)))
    assert scene.engine.steps == [["a0", "b0"], ["a1"], ["a2"]]
    assert [one.num_steps for one in ended] == [3, 1]
    assert scene.finished == scene.closed == ["b", "a"]


def test_a_run_that_is_complete_is_finished_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.train(scene.run("a", range(2, 2)), scene.run("b", range(2)))
    assert scene.engine.steps == [["b0"], ["b1"]]
    assert sorted(scene.finished) == ["a", "b"]


def test_a_run_that_fails_leaves_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    failed, whole = scene.train(scene.run("a", range(3), fails=1), scene.run("b", range(3)))
    assert scene.engine.steps == [["a0", "b0"], ["b1"], ["b2"]]
    assert "it has failed" in str(failed.error)
    assert whole.is_complete
    assert scene.finished == ["b"]


def test_a_run_that_is_further_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.train(scene.run("a", range(2, 4)), scene.run("b", range(4)))
    assert scene.engine.steps == [["b0"], ["b1"], ["a2", "b2"], ["a3", "b3"]]


def test_losses_of_a_step_are_judged_together_once_all_runs_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, dict[int, float]]] = []

    def judge(step: int, losses: Mapping[int, float]) -> Mapping[int, str]:
        seen.append((step, dict(losses)))
        return {1: "is worse"} if len(losses) == 2 else {}

    scene = Scene(monkeypatch)
    resumed = scene.run("a", range(2, 4), evaluated=[2])  # evaluated before it was killed
    ended = scene.train(resumed, scene.run("b", range(4), evaluated=[2]), judge=judge)
    assert seen == [(2, {0: 7.0, 1: 2.0})]
    assert scene.engine.steps == [["b0"], ["b1"], ["a2"], ["a3"]]
    assert (ended[1].stopped, ended[1].num_steps) == ("is worse", 2)
    assert scene.finished == ["a"]


def test_a_resumed_run_stops_by_the_loss_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    run = scene.run("a", range(2, 4), evaluated=[2])
    (ended,) = scene.train(run, judge=lambda *_: {0: "is worse"})
    assert (ended.stopped, scene.engine.steps, scene.finished) == ("is worse", [], [])


def test_a_failure_of_the_engine_ends_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeEngine):
        def forward_backward_runs(self, runs: Sequence[str]) -> list[Any]:
            raise FinetuneError("the device is gone", hint="")

    scene = Scene(monkeypatch, Broken())
    with pytest.raises(FinetuneError, match="the device is gone"):
        scene.train(scene.run("a", range(3)), scene.run("b", range(3)))
    assert not scene.finished


def test_a_failure_that_other_ranks_do_not_know_is_everybodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Several(Ranks):
        run_errors = (RunFailedError,)

    scene = Scene(monkeypatch)
    scene.ranks = Several()
    with pytest.raises(FinetuneError, match="it has failed"):
        scene.train(scene.run("a", range(3), fails=1), scene.run("b", range(3)))
