"""The loss of reward models against a loop over pairs written by hand."""

import math

import pytest
import torch

from finetune.errors import DataError
from finetune.objective.step_rows import StepRows
from offload.engine.objective import OutputObjective, Scores
from tests.unit.finetune.objective.step import (
    PAIRED,
    Step,
    assert_is,
    assert_two_ranks_are_one,
    objective,
)

MARGINS = {0: 0.0, 1: 0.5, 2: 2.0, 3: 0.25}


def rewards(margins: dict[int, float] | None = None) -> Step:
    """Four pairs with one number for each row."""
    rng = torch.Generator().manual_seed(4)
    groups, values = PAIRED
    known = margins or dict.fromkeys(MARGINS, 0.0)
    pairs = zip(groups, values, strict=True)
    return Step(
        rows=StepRows(
            groups_R=torch.tensor(groups),
            values_R=torch.tensor([v * (1 + known[g]) for g, v in pairs], dtype=torch.float64),
            num_trained=len(groups),
        ),
        scores=Scores(
            policy_N=(2 * torch.randn(8, generator=rng, dtype=torch.float64)).requires_grad_(),
            reference_N=torch.zeros(8),
            rows_N=torch.arange(8),
            num_rows=8,
        ),
    )


def by_hand(of: Step, margins: dict[int, float], weight: float) -> torch.Tensor:
    reward = of.scores.policy_N
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in of.pairs():
        margin = margins[int(of.rows.groups_R[chosen])]
        won = 1 / (1 + torch.exp(-(reward[chosen] - reward[rejected] - margin)))
        total = total - torch.log(won) + weight * (reward[chosen] + reward[rejected]) ** 2
    return total / len(of.pairs())


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("margins", [dict.fromkeys(MARGINS, 0.0), MARGINS])
def test_the_loss_is_that_of_a_loop_over_pairs(margins: dict[int, float], weight: float) -> None:
    of = rewards(margins)
    settings = {"method": "reward", "beta": weight}
    assert_is(settings, of, lambda of: by_hand(of, margins, weight))


def test_two_ranks_compute_what_one_does() -> None:
    assert_two_ranks_are_one(
        {"method": "reward", "beta": 0.3}, rewards(MARGINS), [0, 0, 1, 1, 0, 1, 1, 1]
    )


def test_metrics_are_those_of_the_rewards() -> None:
    of = rewards()
    loss = objective({"method": "reward"}, of.rows).loss(of.scores)
    reward = of.scores.policy_N.tolist()
    apart = [reward[chosen] - reward[rejected] for chosen, rejected in of.pairs()]
    metrics = {name: value.item() for name, value in loss.metrics.items()}
    assert metrics["rewards/margins"] == pytest.approx(sum(apart) / 4)
    assert metrics["rewards/accuracies"] == sum(one > 0 for one in apart) / 4
    assert metrics["rewards/mean"] == pytest.approx(sum(reward) / 8)
    assert metrics["rewards/min"] == min(reward)
    assert metrics["rewards/max"] == max(reward)
    difference = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    assert difference == pytest.approx(metrics["rewards/margins"])


def test_it_reads_the_head_and_rewards_that_are_equal_cost_log_2() -> None:
    of = rewards()
    made = objective({"method": "reward"}, of.rows)
    assert isinstance(made, OutputObjective)
    assert made.reference is None
    zeros = Scores(
        policy_N=torch.zeros(8, requires_grad=True),
        reference_N=None,
        rows_N=torch.arange(8),
        num_rows=8,
    )
    assert made.loss(zeros).value.item() == pytest.approx(math.log(2))


def test_a_group_that_is_no_pair_is_refused() -> None:
    of = rewards()
    of.rows.values_R[of.pairs()[0][0]] = 0.0
    with pytest.raises(DataError, match="has 2 answers with the values 0, 0"):
        objective({"method": "reward"}, of.rows).loss(of.scores)
