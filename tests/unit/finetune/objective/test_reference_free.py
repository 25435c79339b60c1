"""SimPO, CPO and ORPO, each against a loop over pairs written by hand."""

from collections.abc import Callable

import pytest
import torch

from tests.unit.finetune.objective.step import (
    Step,
    assert_is,
    assert_two_ranks_are_one,
    computed,
    objective,
    step,
)

BETA, GAMMA, SMOOTHING = 1.3, 0.4, 0.1


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -(1 + (-x).exp()).log()


def simpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    x = BETA * chosen.mean() - BETA * rejected.mean() - GAMMA
    return -(1 - SMOOTHING) * log_sigmoid(x) - SMOOTHING * log_sigmoid(-x)


def cpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    x = BETA * (chosen.sum() - rejected.sum())
    return -(1 - SMOOTHING) * log_sigmoid(x) - SMOOTHING * log_sigmoid(-x)


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    p, q = chosen.mean().exp(), rejected.mean().exp()
    odds = (p / (1 - p)) / (q / (1 - q))
    return -BETA * log_sigmoid(odds.log())


CASES = {
    "simpo": (
        {
            "method": "simpo",
            "beta": BETA,
            "gamma": GAMMA,
            "label_smoothing": SMOOTHING,
            "sft_weight": 0.6,
        },
        simpo,
        0.6,
    ),
    "cpo": (
        {"method": "cpo", "beta": BETA, "label_smoothing": SMOOTHING, "sft_weight": 0.6},
        cpo,
        0.6,
    ),
    "cpo hinge": (
        {"method": "cpo", "loss": "hinge", "beta": BETA},
        lambda c, r: max(torch.zeros(()), 1 - BETA * (c.sum() - r.sum())),
        1.0,
    ),
    "cpo ipo": (
        {"method": "cpo", "loss": "ipo", "beta": BETA, "sft_weight": 0.0},
        lambda c, r: (c.mean() - r.mean() - 1 / (2 * BETA)) ** 2,
        0.0,
    ),
    "orpo": ({"method": "orpo", "beta": BETA}, orpo, 1.0),
}


@pytest.mark.parametrize(("values", "loss_of", "sft_weight"), CASES.values(), ids=CASES)
def test_a_loss_is_the_mean_over_pairs_and_cross_entropy_over_tokens(
    values: dict[str, object], loss_of: Callable[..., torch.Tensor], sft_weight: float
) -> None:
    def by_hand(of: Step) -> torch.Tensor:
        rows = of.of_row(of.scores.policy_N)
        losses = [loss_of(rows[chosen], rows[rejected]) for chosen, rejected in of.pairs()]
        nll = -torch.cat([rows[chosen] for chosen, _ in of.pairs()]).mean()
        return torch.stack(losses).mean() + sft_weight * nll

    metrics = assert_is(values, step(), by_hand)
    assert ("nll_loss" in metrics) == (sft_weight > 0)


@pytest.mark.parametrize("values", [values for values, _, _ in CASES.values()], ids=CASES)
def test_two_ranks_compute_the_loss_of_the_whole_step(values: dict[str, object]) -> None:
    assert_two_ranks_are_one(values, step(), [0, 1, 0, 0, 1, 1, 0, 1])


@pytest.mark.parametrize("values", [values for values, _, _ in CASES.values()], ids=CASES)
def test_a_reference_is_neither_asked_for_nor_read(values: dict[str, object]) -> None:
    of = step()
    loss, _, metrics = computed(values, of)
    assert objective(values, of.rows).reference is None
    assert of.scores.reference_N is not None
    of.scores.reference_N.zero_()
    other, _, _ = computed(values, of)
    assert torch.equal(loss, other)
    is_mean = values["method"] in ("simpo", "orpo") or values.get("loss") == "ipo"
    rows = of.of_row(of.scores.policy_N)
    chosen = [rows[c].mean() if is_mean else rows[c].sum() for c, _ in of.pairs()]
    expected = torch.stack(chosen).mean().item()
    assert metrics["logps/chosen"] == pytest.approx(expected, abs=1e-12)
    assert metrics["rewards/chosen"] == pytest.approx(BETA * expected, abs=1e-12)


def test_odds_are_reported_as_trl_does() -> None:
    of = step()
    _, _, metrics = computed({"method": "orpo"}, of)
    rows = [row.mean().exp() for row in of.of_row(of.scores.policy_N)]
    odds = [(rows[c] / (1 - rows[c]) / rows[r] * (1 - rows[r])).log() for c, r in of.pairs()]
    assert metrics["log_odds_chosen"] == pytest.approx(torch.stack(odds).mean().item(), abs=1e-12)
    assert metrics["log_odds_ratio"] == pytest.approx(
        torch.stack([log_sigmoid(x) for x in odds]).mean().item(), abs=1e-12
    )


@pytest.mark.parametrize("logp", [-1e-9, -0.6931, -0.6932, -60.0, -4000.0])
def test_odds_are_finite_for_answers_that_are_almost_sure_or_almost_never_given(
    logp: float,
) -> None:
    of = step([0, 0], [1, 0])
    of.scores.policy_N.data[of.scores.rows_N == 0] = logp
    loss, gradient, _ = computed({"method": "orpo"}, of)
    assert loss.isfinite()
    assert gradient.isfinite().all()
