import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

from finetune.run.run_files import Evaluations


def theirs(losses: list[float], *, patience: int, min_delta: float) -> tuple[int | None, float]:
    """Run transformers' callback; return after which loss it stops, and the lowest until then."""
    callback = EarlyStoppingCallback(patience, min_delta)
    args: Any = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    state: Any = SimpleNamespace(best_metric=None)
    control: Any = SimpleNamespace(should_training_stop=False)
    for number, loss in enumerate(losses, 1):
        callback.on_evaluate(args, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # Trainer does so afterwards
            state.best_metric = loss
        if control.should_training_stop:
            return number, state.best_metric
    return None, state.best_metric


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("min_delta", [0.0, 0.05])
@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_stops_after_the_evaluation_after_which_transformers_does(
    patience: int, min_delta: float, seed: int
) -> None:
    chance = random.Random(seed)
    losses = [2 - 0.03 * number + chance.random() / 5 for number in range(30)]
    found, stopped = Evaluations(patience=patience, min_delta=min_delta), None
    for number, loss in enumerate(losses, 1):
        found = found.after(number, loss)
        if found.are_enough:
            stopped = number
            break
    assert (stopped, found.lowest) == theirs(losses, patience=patience, min_delta=min_delta)


def test_a_fall_that_is_too_small_is_the_best_and_still_counts_as_none() -> None:
    found = Evaluations(patience=2, min_delta=0.1)
    for step, loss in ((10, 1.0), (20, 0.95), (30, 0.92)):
        assert not found.are_enough
        found = found.after(step, loss)
    assert found.are_enough
    assert (found.best_step, found.best_loss) == (30, 0.92)


def test_rows_of_a_run_give_the_same_and_the_best_is_one_that_is_saved() -> None:
    none = Evaluations(patience=3, min_delta=0.0)
    rows: list[dict[str, Any]] = [
        {"step": 1},
        *({"step": s, "eval_loss": x} for s, x in ((2, 1.0), (4, 0.5), (6, 0.7))),
    ]
    live = none.after(2, 1.0).after(4, 0.5).after(6, 0.7)
    assert none.after_rows(rows, saved=[2, 4, 6]) == live
    assert (live.best_step, live.num_without) == (4, 1)
    lost = none.after_rows(rows, saved=[2, 6])
    assert (lost.best_step, lost.best_loss, lost.lowest, lost.num_without) == (6, 0.7, 0.5, 1)
