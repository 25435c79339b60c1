"""Rankings of any number of answers, against a loop over ranks written by hand."""

import pytest
import torch

from finetune.errors import DataError
from tests.unit.finetune.objective.step import (
    Step,
    assert_is,
    assert_two_ranks_are_one,
    computed,
    step,
)

BETA = 0.3
VALUES = {"method": "dpo", "loss": "plackett_luce", "beta": BETA, "sft_weight": 0.5}
GROUPS = [2, 0, 2, 1, 0, 2, 1, 2, 0]
RANKS = [0.5, 1.0, -3.0, 2.0, 7.0, 0.1, 5.0, 4.0, 3.0]


def rewards(of: Step) -> list[torch.Tensor]:
    assert of.scores.reference_N is not None
    policy, reference = of.of_row(of.scores.policy_N), of.of_row(of.scores.reference_N)
    return [BETA * (p.sum() - q.sum()) for p, q in zip(policy, reference, strict=True)]


def by_hand(of: Step) -> torch.Tensor:
    """Draw the best answer of those that are left, again and again."""
    scores, losses, best = rewards(of), [], []
    for group in (0, 1, 2):
        left = [i for i in range(of.num_rows) if GROUPS[i] == group]
        best.append(max(left, key=lambda i: RANKS[i]))
        likelihood = torch.ones((), dtype=torch.float64)
        while left:
            first = max(left, key=lambda i: RANKS[i])
            likelihood = likelihood * scores[first].exp() / sum(scores[i].exp() for i in left)
            left.remove(first)
        losses.append(-likelihood.log())
    nll = -torch.cat([of.of_row(of.scores.policy_N)[i] for i in best]).mean()
    return torch.stack(losses).mean() + 0.5 * nll


def test_a_ranking_has_the_likelihood_of_drawing_its_answers_in_this_order() -> None:
    metrics = assert_is(VALUES, step(GROUPS, RANKS), by_hand)
    scores = [score.item() for score in rewards(step(GROUPS, RANKS))]
    right: list[list[bool]] = [[], [], []]
    for i in range(len(GROUPS)):
        for j in range(len(GROUPS)):
            if GROUPS[i] == GROUPS[j] and RANKS[i] > RANKS[j]:
                right[GROUPS[i]].append(scores[i] > scores[j])
    expected = sum(sum(wins) / len(wins) for wins in right) / 3
    assert 0 < expected < 1
    assert metrics["rewards/accuracies"] == pytest.approx(expected, abs=1e-12)
    margins = (scores[4] - scores[1]) + (scores[6] - scores[3]) + (scores[7] - scores[2])
    assert metrics["rewards/margins"] == pytest.approx(margins / 3, abs=1e-12)


def test_a_ranking_of_two_is_a_pair() -> None:
    ranked = computed(VALUES, step())
    paired = computed({**VALUES, "loss": "sigmoid"}, step())
    torch.testing.assert_close(ranked[0], paired[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(ranked[1], paired[1], rtol=1e-12, atol=1e-15)
    assert ranked[2] == pytest.approx(paired[2], abs=1e-13)


def test_one_good_answer_and_several_bad_ones_are_compared_as_in_s_dpo() -> None:
    def s_dpo(of: Step) -> torch.Tensor:
        good, *bad = rewards(of)
        x = -torch.stack([(reward - good).exp() for reward in bad]).sum().log()
        nll = -of.of_row(of.scores.policy_N)[0].mean()
        return (1 + (-x).exp()).log() + 0.5 * nll

    assert_is(VALUES, step([0, 0, 0, 0], [1, 0, 0, 0]), s_dpo)


def test_answers_that_are_equally_good_are_not_compared_with_each_other() -> None:
    def by_pairs(of: Step) -> torch.Tensor:
        first, second, worst = rewards(of)
        losses = [(1 + (worst - good).exp()).log() for good in (first, second)]
        nll = -of.of_row(of.scores.policy_N)[0].mean()
        return losses[0] + losses[1] + 0.5 * nll

    metrics = assert_is(VALUES, step([0, 0, 0], [3, 3, -1]), by_pairs)
    first, second, worst = rewards(step([0, 0, 0], [3, 3, -1]))
    wins = (float(first > worst) + float(second > worst)) / 2
    assert metrics["rewards/accuracies"] == pytest.approx(wins)


def test_two_ranks_compute_the_loss_of_the_whole_step() -> None:
    assert_two_ranks_are_one(VALUES, step(GROUPS, RANKS), [0, 1, 1, 0, 1, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("groups", "ranks", "shown"),
    [
        ([0, 0, 4], [1.0, 0.0, 2.0], "group 4 of a step has 1 answers with the values 2"),
        ([0, 0, 0], [1.0, 1.0, 1.0], "group 0 of a step has 3 answers with the values 1, 1, 1"),
    ],
)
def test_a_ranking_without_an_order_is_refused(
    groups: list[int], ranks: list[float], shown: str
) -> None:
    with pytest.raises(DataError, match=shown):
        computed(VALUES, step(groups, ranks))


@pytest.mark.parametrize(
    ("groups", "values", "shown"),
    [
        ([0, 0, 3], [1.0, 0.0, 1.0], "group 3 of a step has 1 answers with the values 1;"),
        ([0, 0, 1, 1, 1], [1.0, 0, 1, 0, 0], "group 1 of a step has 3 answers .* 1, 0, 0"),
        ([0, 0], [1.0, 1.0], "group 0 of a step has 2 answers with the values 1, 1"),
    ],
)
@pytest.mark.parametrize("method", ["dpo", "simpo"])
def test_a_pair_is_one_chosen_and_one_rejected_answer(
    groups: list[int], values: list[float], shown: str, method: str
) -> None:
    with pytest.raises(DataError, match=shown):
        computed({"method": method}, step(groups, values))
