"""Losses of pairs against a reference, each against a loop over pairs written by hand."""

import math
from collections.abc import Callable

import pytest
import torch

from finetune.objective.dpo import LOSSES
from finetune.recipe.sections import LOSSES as NAMES
from tests.tiers import mostly_slow
from tests.unit.finetune.objective.step import (
    Step,
    assert_is,
    assert_two_ranks_are_one,
    computed,
    step,
)

BETA, SMOOTHING = 0.3, 0.1


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -(1 + (-x).exp()).log()


# Each of the log-ratios of the chosen and the rejected answer, and their numbers of tokens.
BY_HAND: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": lambda c, r, m, n: (
        -(1 - SMOOTHING) * log_sigmoid(BETA * (c - r)) - SMOOTHING * log_sigmoid(BETA * (r - c))
    ),
    "hinge": lambda c, r, m, n: max(torch.zeros(()), 1 - BETA * (c - r)),
    "ipo": lambda c, r, m, n: (c / m - r / n - 1 / (2 * BETA)) ** 2,
    "robust": lambda c, r, m, n: (
        (SMOOTHING * log_sigmoid(BETA * (r - c)) - (1 - SMOOTHING) * log_sigmoid(BETA * (c - r)))
        / (1 - 2 * SMOOTHING)
    ),
    "sigmoid_norm": lambda c, r, m, n: -log_sigmoid(BETA * (c / m - r / n)),
    "exo_pair": lambda c, r, m, n: (
        sigmoid(BETA * (c - r)) * (sigmoid(BETA * (c - r)) / (1 - SMOOTHING)).log()
        + sigmoid(BETA * (r - c)) * (sigmoid(BETA * (r - c)) / SMOOTHING).log()
    ),
    "nca_pair": lambda c, r, m, n: (
        -log_sigmoid(BETA * c) - 0.5 * log_sigmoid(-BETA * c) - 0.5 * log_sigmoid(-BETA * r)
    ),
    "bco_pair": lambda c, r, m, n: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * r),
    "sppo_hard": lambda c, r, m, n: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, m, n: 1 - sigmoid(BETA * c) + sigmoid(BETA * r),
    "apo_down": lambda c, r, m, n: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r)),
    "discopop": lambda c, r, m, n: (
        (1 - sigmoid(BETA * (c - r) / 0.05)) * -log_sigmoid(BETA * (c - r))
        + sigmoid(BETA * (c - r) / 0.05) * (BETA * (r - c)).exp()
    ),
}
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")


def settings(loss: str, **more: object) -> dict[str, object]:
    smoothing = {"label_smoothing": SMOOTHING} if loss in SMOOTHED else {}
    return {"method": "dpo", "loss": loss, "beta": BETA} | smoothing | more


def by_hand(loss: str) -> Callable[[Step], torch.Tensor]:
    def mean(of: Step) -> torch.Tensor:
        assert of.scores.reference_N is not None
        policy = of.of_row(of.scores.policy_N)
        reference = of.of_row(of.scores.reference_N)
        losses = []
        for chosen, rejected in of.pairs():
            c = policy[chosen].sum() - reference[chosen].sum()
            r = policy[rejected].sum() - reference[rejected].sum()
            losses.append(BY_HAND[loss](c, r, len(policy[chosen]), len(policy[rejected])))
        return torch.stack(losses).mean()

    return mean


def sorted_by_hand(loss: str) -> Callable[[Step], torch.Tensor]:
    def mean(of: Step) -> torch.Tensor:
        assert of.scores.reference_N is not None
        p = [row.sum() for row in of.of_row(of.scores.policy_N)]
        q = [row.sum() for row in of.of_row(of.scores.reference_N)]
        if loss == "aot":
            first = sorted(p[c] - p[r] for c, r in of.pairs())
            second = sorted(q[c] - q[r] for c, r in of.pairs())
        else:
            first = sorted(p[c] - q[c] for c, _ in of.pairs())
            second = sorted(p[r] - q[r] for _, r in of.pairs())
        total = torch.zeros((), dtype=torch.float64)
        for a, b in zip(first, second, strict=True):
            total = total - (1 - SMOOTHING) * log_sigmoid(BETA * (a - b))
            total = total - SMOOTHING * log_sigmoid(BETA * (b - a))
        return total / len(first)

    return mean


@pytest.mark.parametrize("loss", BY_HAND)
def test_a_loss_is_the_mean_over_pairs_of_its_formula(loss: str) -> None:
    assert_is(settings(loss), step(), by_hand(loss))


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_optimal_transport_sorts_all_pairs_of_the_step(loss: str) -> None:
    assert_is(settings(loss), step(), sorted_by_hand(loss))


def test_every_loss_of_the_recipe_was_written_by_hand() -> None:
    assert set(LOSSES) == set(BY_HAND) | {"aot", "aot_unpaired"}
    assert set(NAMES["dpo"]) == set(LOSSES) | {"plackett_luce"}


def test_cross_entropy_of_the_chosen_answers_is_a_mean_over_their_tokens() -> None:
    def mixed(of: Step) -> torch.Tensor:
        chosen = torch.cat([of.of_row(of.scores.policy_N)[c] for c, _ in of.pairs()])
        return by_hand("sigmoid")(of) + 0.7 * -chosen.mean()

    metrics = assert_is(settings("sigmoid", sft_weight=0.7), step(), mixed)
    of = step()
    chosen = torch.cat([of.of_row(of.scores.policy_N)[c] for c, _ in of.pairs()])
    assert metrics["nll_loss"] == pytest.approx(-chosen.mean().item(), abs=1e-12)


def test_metrics_are_those_that_users_know() -> None:
    of = step()
    assert of.scores.reference_N is not None
    _, _, metrics = computed(settings("hinge"), of)
    p = [row.sum().item() for row in of.of_row(of.scores.policy_N)]
    q = [row.sum().item() for row in of.of_row(of.scores.reference_N)]
    chosen = [BETA * (p[c] - q[c]) for c, _ in of.pairs()]
    rejected = [BETA * (p[r] - q[r]) for _, r in of.pairs()]
    wins = [a > b for a, b in zip(chosen, rejected, strict=True)]
    assert 0 < sum(wins) < 4
    assert metrics == pytest.approx(
        {
            "rewards/chosen": sum(chosen) / 4,
            "rewards/rejected": sum(rejected) / 4,
            "rewards/margins": (sum(chosen) - sum(rejected)) / 4,
            "rewards/accuracies": sum(wins) / 4,
            "logps/chosen": sum(p[c] for c, _ in of.pairs()) / 4,
            "logps/rejected": sum(p[r] for _, r in of.pairs()) / 4,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("loss", mostly_slow([*LOSSES], "sigmoid", "aot", "aot_unpaired"))
def test_two_ranks_compute_the_loss_of_the_whole_step(loss: str) -> None:
    values = settings(loss, sft_weight=0.5)
    assert_two_ranks_are_one(values, step(), [0, 0, 0, 1, 1, 1, 0, 1])  # pairs lie across ranks


def test_a_pair_that_the_policy_cannot_tell_apart_has_the_loss_of_a_coin() -> None:
    of = step([0, 0], [1, 0])
    of.scores.policy_N.data.fill_(-1.0)
    assert of.scores.reference_N is not None
    of.scores.reference_N.fill_(-1.0)
    loss, gradient, metrics = computed({"method": "dpo"}, of)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    assert metrics["rewards/accuracies"] == 0
    is_chosen_N = of.scores.rows_N == 0
    assert gradient[is_chosen_N].eq(-0.05).all()
    assert gradient[~is_chosen_N].eq(0.05).all()


def test_log_probabilities_that_are_far_apart_have_a_finite_loss() -> None:
    of = step([0, 0, 1, 1], [1, 0, 0, 1])
    of.scores.policy_N.data.fill_(-4000.0)
    for loss in LOSSES:
        value, gradient, _ = computed(settings(loss), of)
        if loss != "discopop":  # its exponential of a reward grows without limit
            assert value.isfinite(), loss
            assert gradient.isfinite().all(), loss


@pytest.mark.parametrize("loss", LOSSES)
def test_a_log_probability_that_is_no_number_makes_the_loss_none(loss: str) -> None:
    of = step()
    of.scores.policy_N.data[3] = math.nan
    assert computed(settings(loss), of)[0].isnan()
