"""KTO, against a loop over answers written by hand; its KL divergence is of the whole step."""

import math
from dataclasses import replace

import pytest
import torch

from finetune.errors import DataError
from tests.unit.finetune.objective.step import (
    Step,
    assert_is,
    assert_two_ranks_are_one,
    computed,
    objective,
    step,
)

BETA, GOOD, BAD = 0.3, 1.5, 0.8
VALUES = {
    "method": "kto",
    "beta": BETA,
    "desirable_weight": GOOD,
    "undesirable_weight": BAD,
}
GROUPS, LABELS = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [1, 0, 1, 1, 0, 0, 0, 0, 0, 0]


def of_step(*, drift: float = 0.1, seed: int = 0) -> Step:
    """Five rows, and five that are only scored; the reference is by `drift` a token less likely."""
    made = step(GROUPS, LABELS, num_trained=5, seed=seed)
    assert made.scores.reference_N is not None
    made.scores.reference_N.sub_(drift)
    return made


def ratios(of: Step) -> list[torch.Tensor]:
    assert of.scores.reference_N is not None
    policy, reference = of.of_row(of.scores.policy_N), of.of_row(of.scores.reference_N)
    return [p.sum() - q.sum() for p, q in zip(policy, reference, strict=True)]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def by_hand(of: Step) -> torch.Tensor:
    r = ratios(of)
    kl = max(0.0, sum(x.item() for x in r[5:]) / 5)
    total = torch.zeros((), dtype=torch.float64)
    for ratio, label in zip(r[:5], LABELS[:5], strict=True):
        if label:
            total = total + GOOD * (1 - sigmoid(BETA * (ratio - kl)))
        else:
            total = total + BAD * (1 - sigmoid(BETA * (kl - ratio)))
    return total / 5


def without_kl(of: Step) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for ratio, label in zip(ratios(of)[:5], LABELS[:5], strict=True):
        total = total + (
            GOOD * (1 - sigmoid(BETA * ratio)) if label else BAD * sigmoid(BETA * ratio)
        )
    return total / 5


def test_the_loss_is_the_mean_over_answers_against_the_divergence_of_the_step() -> None:
    of = of_step()
    metrics = assert_is(VALUES, of, by_hand)
    r = [ratio.item() for ratio in ratios(of)]
    assert metrics["kl"] == pytest.approx(sum(r[5:]) / 5, abs=1e-12)
    assert metrics["kl"] > 0.1
    assert metrics["rewards/chosen"] == pytest.approx(BETA * (r[0] + r[2] + r[3]) / 3, abs=1e-12)
    assert metrics["rewards/rejected"] == pytest.approx(BETA * (r[1] + r[4]) / 2, abs=1e-12)
    margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    assert metrics["rewards/margins"] == pytest.approx(margin, abs=1e-12)
    p = [row.sum().item() for row in of.of_row(of.scores.policy_N)]
    assert metrics["logps/chosen"] == pytest.approx((p[0] + p[2] + p[3]) / 3, abs=1e-12)
    assert metrics["logps/rejected"] == pytest.approx((p[1] + p[4]) / 2, abs=1e-12)


def test_a_divergence_below_zero_is_zero() -> None:
    assert assert_is(VALUES, of_step(drift=-0.4), by_hand)["kl"] == 0
    assert torch.equal(
        computed(VALUES, of_step(drift=-0.4))[0],
        computed({**VALUES, "loss": "apo_zero_unpaired"}, of_step(drift=-0.4))[0],
    )


def test_rows_that_are_only_scored_have_no_gradient() -> None:
    of = of_step()
    _, gradient, _ = computed(VALUES, of)
    assert gradient[of.scores.rows_N >= 5].eq(0).all()
    assert gradient[of.scores.rows_N < 5].ne(0).all()


def test_without_a_divergence_it_is_apo() -> None:
    metrics = assert_is({**VALUES, "loss": "apo_zero_unpaired"}, of_step(), without_kl)
    assert "kl" not in metrics


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_two_ranks_compute_the_loss_of_the_whole_step(loss: str) -> None:
    ranks = [0, 1, 1, 0, 0, 1, 0, 1, 1, 0]
    assert_two_ranks_are_one({**VALUES, "loss": loss}, of_step(), ranks)


@pytest.mark.parametrize(
    ("label", "kind", "other"), [(1, "chosen", "rejected"), (0, "rejected", "chosen")]
)
def test_a_step_of_one_kind_has_a_loss_and_reports_that_kind_only(
    label: int, kind: str, other: str
) -> None:
    of = of_step()
    of = replace(of, rows=replace(of.rows, values_R=torch.full((10,), float(label))))
    loss, gradient, metrics = computed(VALUES, of)
    assert loss.isfinite()
    assert gradient.abs().sum() > 0
    assert f"rewards/{kind}" in metrics
    assert f"rewards/{other}" not in metrics
    assert "rewards/margins" not in metrics


def test_a_step_without_mismatched_rows_is_refused_if_the_loss_reads_them() -> None:
    of = step([0, 1], [1, 0])
    with pytest.raises(DataError, match="a step of KTO has no prompt with the answer to another"):
        computed(VALUES, of)
    assert computed({**VALUES, "loss": "apo_zero_unpaired"}, of)[0].isfinite()


def test_a_label_that_is_neither_is_refused() -> None:
    with pytest.raises(DataError, match=r"a row of a step has the label 0\.5"):
        computed(VALUES, step([0, 1, 0, 1], [1, 0.5, 0, 0], num_trained=2))


def test_a_divergence_that_is_no_number_makes_the_loss_none() -> None:
    of = of_step()
    of.scores.policy_N.data[-1] = math.nan
    assert computed(VALUES, of)[0].isnan()


def test_sums_that_are_known_take_the_place_of_the_reference() -> None:
    of = of_step()
    sums_R = torch.stack([q.sum() for q in of.of_row(of.scores.reference_N)])
    expected, gradient, metrics = computed(VALUES, of)
    known = VALUES | {"reference": "precomputed"}  # no recipe, but scored rows may be known too
    rows = replace(of.rows, reference_R=sums_R)
    alone = Step(rows=rows, scores=replace(of.scores, reference_N=None))
    again = computed(known, alone)
    torch.testing.assert_close(again[0], expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(again[1], gradient, rtol=1e-12, atol=0)
    assert again[2] == pytest.approx(metrics, abs=1e-12)
    assert objective(known, rows).reference is None
    assert objective(VALUES, of.rows).reference is not None


@pytest.mark.parametrize("method", ["kto", "dpo", "grpo"])
def test_the_recipe_says_what_is_compared_with_and_not_the_rows(method: str) -> None:
    of = of_step()
    values = {"method": method, "beta": 0.1} | ({"loss": "rloo"} if method == "grpo" else {})
    rows = replace(of.rows, reference_R=torch.zeros(10))
    assert objective(values, rows).reference is not None
    values |= {"reference": "precomputed"}
    assert objective(values, rows).reference is None
    with pytest.raises(DataError, match="the rows have no log-probabilities of it"):
        objective(values, of.rows)
