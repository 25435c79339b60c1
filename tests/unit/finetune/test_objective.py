"""Losses of rows and of pairs against sums by hand."""

import math
import random
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from finetune.data.step_rows import Exchange, StepRows, ordered, row_sums, summed
from finetune.errors import DataError
from finetune.objectives.classify.loss import counts_of, macro_f1
from finetune.objectives.dpo.loss import LOSSES
from finetune.recipe.extensions import ObjectiveSection, StepData
from finetune.training.kinds.features import Features, PassThrough
from finetune.training.objectives import Objectives, mean_of
from finetune.training.ranks import Ranks
from offload.engine.objective import Objective, OutputObjective, Scores, StepLoss
from tests.objectives import losses_of
from tests.tiers import mostly_slow

SEQ_LEN = 50
PAIRED = ([3, 0, 2, 0, 1, 3, 2, 1], [1, 0, 1, 1, 0, 0, 0, 1])
"""Groups and values of four pairs, out of order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows and their scores; those of row i are `policy_N[rows_N == i]`."""

    rows: StepRows
    scores: Scores

    @property
    def num_rows(self) -> int:
        return self.scores.num_rows

    def of_row(self, values_N: torch.Tensor | None) -> list[torch.Tensor]:
        """The values of each row's tokens."""
        assert values_N is not None
        return [values_N[self.scores.rows_N == i] for i in range(self.num_rows)]

    def pairs(self) -> list[tuple[int, int]]:
        """Chosen and rejected row of each group of two, found by looking at all rows."""
        found = []
        for group in dict.fromkeys(self.rows.groups_R.tolist()):
            members = [i for i in range(self.num_rows) if self.rows.groups_R[i] == group]
            members.sort(key=lambda i: -float(self.rows.values_R[i]))
            found.append((members[0], members[1]))
        return found


def step(
    groups: Sequence[int] = PAIRED[0],
    values: Sequence[float] = PAIRED[1],
    *,
    num_trained: int | None = None,
    has_sampler: bool = False,
    seed: int = 0,
) -> Step:
    """Make rows of 1 to 9 tokens each, likelier or not than by the reference."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 10, (len(groups),), generator=rng)
    rows_N = torch.arange(len(groups)).repeat_interleave(sizes)

    def logps(near: torch.Tensor | None = None) -> torch.Tensor:
        drawn = torch.rand(len(rows_N), generator=rng, dtype=torch.float64)
        return -3 * drawn if near is None else near - 0.4 * (drawn - 0.5)

    policy_N = logps()
    scores = Scores(
        policy_N=policy_N.requires_grad_(),
        reference_N=logps(policy_N.detach()),
        rows_N=rows_N,
        num_rows=len(groups),
    )
    rows = StepRows(
        groups_R=torch.tensor(groups),
        values_R=torch.tensor(values, dtype=torch.float32),
        num_trained=len(groups) if num_trained is None else num_trained,
        sampler_N=logps(policy_N.detach()) if has_sampler else None,
    )
    return Step(rows=rows, scores=scores)


def objective(
    values: Mapping[str, Any], rows: StepRows, exchange: Exchange | None = None
) -> Objective:
    """Make the objective of a recipe with these settings."""
    section = ObjectiveSection.model_validate(values)
    return section.objective(StepData(rows=rows, seq_len=SEQ_LEN, exchange=exchange))


def computed(
    values: Mapping[str, Any], of: Step, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, float]]:
    """Return the loss of a step, its gradient by each log-probability, and the metrics."""
    result = objective(values, of.rows, exchange).loss(of.scores)
    (gradient,) = torch.autograd.grad(result.value, of.scores.policy_N)
    metrics = {name: value.item() for name, value in result.metrics.items()}
    assert not any(value.requires_grad for value in result.metrics.values())
    return result.value.detach(), gradient, metrics


def assert_is(
    values: Mapping[str, Any], of: Step, by_hand: Callable[[Step], torch.Tensor]
) -> Mapping[str, float]:
    """Check loss and gradient against a loop written by hand; return the metrics."""
    loss, gradient, metrics = computed(values, of)
    expected = by_hand(of)
    (expected_gradient,) = torch.autograd.grad(expected, of.scores.policy_N)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13)
    assert gradient.abs().sum() > 0
    return metrics


def cut(whole: Step, ranks_R: Sequence[int]) -> list[Step]:
    """Give each row of a step to one of two ranks."""
    parts = []
    for rank in range(2):
        mine = [i for i, theirs in enumerate(ranks_R) if theirs == rank]
        is_mine_N = torch.tensor([i in mine for i in whole.scores.rows_N.tolist()])
        numbers = [mine.index(i) for i in whole.scores.rows_N[is_mine_N].tolist()]
        reference_N, sampler_N = whole.scores.reference_N, whole.rows.sampler_N
        assert reference_N is not None
        scores = Scores(
            policy_N=whole.scores.policy_N.detach()[is_mine_N].requires_grad_(),
            reference_N=reference_N[is_mine_N],
            rows_N=torch.tensor(numbers, dtype=torch.int64),
            num_rows=len(mine),
        )
        rows = replace(
            whole.rows,
            groups_R=whole.rows.groups_R[mine],
            values_R=whole.rows.values_R[mine],
            num_trained=sum(i < whole.rows.num_trained for i in mine),
            sampler_N=None if sampler_N is None else sampler_N[is_mine_N],
        )
        parts.append(Step(rows=rows, scores=scores))
    return parts


def assert_two_ranks_are_one(
    values: Mapping[str, Any], whole: Step, ranks_R: Sequence[int]
) -> None:
    """Check that the ranks' losses add up to the step's, and that each has its own gradients."""
    loss, gradient, metrics = computed(values, whole)
    barrier = threading.Barrier(2)
    tables: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]

    def of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, float]]:
        def exchange(table: torch.Tensor) -> Sequence[torch.Tensor]:
            assert not table.requires_grad
            tables[rank] = table
            barrier.wait(timeout=30)
            theirs = tables[1 - rank]
            barrier.wait(timeout=30)
            return (theirs,)

        return computed(values, cut(whole, ranks_R)[rank], exchange)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(of_rank, range(2)))
    torch.testing.assert_close(sum(part for part, _, _ in results), loss, rtol=1e-12, atol=1e-13)
    for rank, (_, of_own, theirs) in enumerate(results):
        is_own_N = torch.tensor(ranks_R)[whole.scores.rows_N] == rank
        torch.testing.assert_close(of_own, gradient[is_own_N], rtol=1e-12, atol=1e-13)
        assert theirs.keys() == metrics.keys()
        for name, value in theirs.items():
            assert abs(value - metrics[name]) < 1e-12, name


# ----------------------------------------------------------------------------------------- row sums


def test_sums_are_by_row_and_in_float64() -> None:
    values_N = torch.tensor([1e8, 0.25, -1e8, 0.5])
    sums_R = summed(values_N, torch.tensor([1, 0, 1, 1]), 3)
    assert sums_R.tolist() == [0.25, 0.5, 0.0]
    assert sums_R.dtype == torch.float64


def test_others_rows_follow_own_ones_as_constants() -> None:
    scores = Scores(
        policy_N=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        reference_N=torch.tensor([-1.5, -2.5, -3.5]),
        rows_N=torch.tensor([0, 1, 1]),
        num_rows=2,
    )
    rows = StepRows(groups_R=torch.tensor([7, 8]), values_R=torch.tensor([1.0, 0.0]), num_trained=1)
    theirs = torch.tensor([[-9.0, -8.0, 4, 7, 0, 1]], dtype=torch.float64)
    sent = []

    def exchange(table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sent.append(table)
        return (theirs, theirs)

    sums = row_sums(scores, rows, exchange, has_reference=True)
    assert sent[0].tolist() == [[-1, -1.5, 1, 7, 1, 1], [-5, -6, 2, 8, 0, 0]]
    assert sums.policy_A.tolist() == [-1, -5, -9, -9]
    assert sums.log_ratios.tolist() == [0.5, 1, -1, -1]
    assert sums.tokens_A.tolist() == [1, 2, 4, 4]
    assert sums.groups_A.tolist() == [7, 8, 7, 7]
    assert sums.is_trained_A.tolist() == [True, False, True, True]
    assert sums.share == 1 / 3
    (gradient_N,) = torch.autograd.grad(sums.own_part(sums.policy_A.sum() * 3), scores.policy_N)
    assert gradient_N.tolist() == [3, 3, 3]
    assert sums.own_part(torch.tensor(6.0, dtype=torch.float64)).item() == 2


def test_groups_are_of_trained_rows_with_the_highest_value_first() -> None:
    made = step([2, 0, 2, 0, 2, 0], [1, 5, 3, 6, 2, 9], num_trained=5)
    groups = ordered(row_sums(made.scores, made.rows, None))
    assert [group.tolist() for group in groups] == [[3, 1], [2, 4, 0]]


def test_a_rank_without_rows_has_its_part_of_the_loss_and_no_gradient() -> None:
    assert_two_ranks_are_one({"method": "dpo"}, step([0, 0], [0, 1]), [0, 0])


@pytest.mark.parametrize(
    "values",
    [
        {"method": "dpo", "loss": "aot"},
        {"method": "dpo", "loss": "plackett_luce"},
        {"method": "simpo"},
        {"method": "kto"},
        {"method": "grpo", "loss": "grpo", "beta": 0.1},
        {"method": "grpo", "loss": "rloo"},
    ],
    ids=lambda values: values.get("loss", values["method"]),
)
def test_neither_the_order_of_rows_nor_the_numbers_of_groups_change_a_loss(
    values: dict[str, object],
) -> None:
    num_trained = 6 if values["method"] == "kto" else 8
    made = step(num_trained=num_trained)
    order = [3, 1, 5, 0, 4, 2, 7, 6]  # rows that are only scored stay last
    numbers = torch.tensor([order.index(i) for i in range(8)])
    moved = replace(
        made,
        scores=replace(made.scores, rows_N=numbers[made.scores.rows_N]),
        rows=replace(
            made.rows,
            groups_R=9 - made.rows.groups_R[order],
            values_R=made.rows.values_R[order],
        ),
    )
    loss, gradient, metrics = computed(values, made)
    again, of_moved, others = computed(values, moved)
    torch.testing.assert_close(again, loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(of_moved, gradient, rtol=1e-12, atol=1e-15)
    assert others == pytest.approx(metrics, abs=1e-13)


def test_float32_log_probabilities_get_a_float32_gradient() -> None:
    made = step()
    exact = computed({"method": "dpo"}, made)
    assert made.scores.reference_N is not None
    single = Scores(
        policy_N=made.scores.policy_N.detach().float().requires_grad_(),
        reference_N=made.scores.reference_N.float(),
        rows_N=made.scores.rows_N,
        num_rows=made.num_rows,
    )
    loss, gradient, _ = computed({"method": "dpo"}, type(made)(rows=made.rows, scores=single))
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(loss, exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-5, atol=1e-8)


# ------------------------------------------------------------------------------------------ ranking


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


# ---------------------------------------------------------------------------------------------- dpo


DPO_BETA, SMOOTHING = 0.3, 0.1


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -(1 + (-x).exp()).log()


# Each of the log-ratios of the chosen and the rejected answer, and their numbers of tokens.
BY_HAND: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": lambda c, r, m, n: (
        -(1 - SMOOTHING) * log_sigmoid(DPO_BETA * (c - r))
        - SMOOTHING * log_sigmoid(DPO_BETA * (r - c))
    ),
    "hinge": lambda c, r, m, n: max(torch.zeros(()), 1 - DPO_BETA * (c - r)),
    "ipo": lambda c, r, m, n: (c / m - r / n - 1 / (2 * DPO_BETA)) ** 2,
    "robust": lambda c, r, m, n: (
        (
            SMOOTHING * log_sigmoid(DPO_BETA * (r - c))
            - (1 - SMOOTHING) * log_sigmoid(DPO_BETA * (c - r))
        )
        / (1 - 2 * SMOOTHING)
    ),
    "sigmoid_norm": lambda c, r, m, n: -log_sigmoid(DPO_BETA * (c / m - r / n)),
    "exo_pair": lambda c, r, m, n: (
        sigmoid(DPO_BETA * (c - r)) * (sigmoid(DPO_BETA * (c - r)) / (1 - SMOOTHING)).log()
        + sigmoid(DPO_BETA * (r - c)) * (sigmoid(DPO_BETA * (r - c)) / SMOOTHING).log()
    ),
    "nca_pair": lambda c, r, m, n: (
        -log_sigmoid(DPO_BETA * c)
        - 0.5 * log_sigmoid(-DPO_BETA * c)
        - 0.5 * log_sigmoid(-DPO_BETA * r)
    ),
    "bco_pair": lambda c, r, m, n: -log_sigmoid(DPO_BETA * c) - log_sigmoid(-DPO_BETA * r),
    "sppo_hard": lambda c, r, m, n: (c - 1 / (2 * DPO_BETA)) ** 2 + (r + 1 / (2 * DPO_BETA)) ** 2,
    "apo_zero": lambda c, r, m, n: 1 - sigmoid(DPO_BETA * c) + sigmoid(DPO_BETA * r),
    "apo_down": lambda c, r, m, n: sigmoid(DPO_BETA * c) + 1 - sigmoid(DPO_BETA * (c - r)),
    "discopop": lambda c, r, m, n: (
        (1 - sigmoid(DPO_BETA * (c - r) / 0.05)) * -log_sigmoid(DPO_BETA * (c - r))
        + sigmoid(DPO_BETA * (c - r) / 0.05) * (DPO_BETA * (r - c)).exp()
    ),
}
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")


def settings(loss: str, **more: object) -> dict[str, object]:
    smoothing = {"label_smoothing": SMOOTHING} if loss in SMOOTHED else {}
    return {"method": "dpo", "loss": loss, "beta": DPO_BETA} | smoothing | more


def by_hand_dpo(loss: str) -> Callable[[Step], torch.Tensor]:
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
            total = total - (1 - SMOOTHING) * log_sigmoid(DPO_BETA * (a - b))
            total = total - SMOOTHING * log_sigmoid(DPO_BETA * (b - a))
        return total / len(first)

    return mean


@pytest.mark.parametrize("loss", BY_HAND)
def test_a_loss_is_the_mean_over_pairs_of_its_formula(loss: str) -> None:
    assert_is(settings(loss), step(), by_hand_dpo(loss))


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_optimal_transport_sorts_all_pairs_of_the_step(loss: str) -> None:
    assert_is(settings(loss), step(), sorted_by_hand(loss))


def test_every_loss_of_the_recipe_was_written_by_hand() -> None:
    assert set(LOSSES) == set(BY_HAND) | {"aot", "aot_unpaired"}
    assert set(losses_of("dpo")) == set(LOSSES) | {"plackett_luce"}


def test_cross_entropy_of_the_chosen_answers_is_a_mean_over_their_tokens() -> None:
    def mixed(of: Step) -> torch.Tensor:
        chosen = torch.cat([of.of_row(of.scores.policy_N)[c] for c, _ in of.pairs()])
        return by_hand_dpo("sigmoid")(of) + 0.7 * -chosen.mean()

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
    chosen = [DPO_BETA * (p[c] - q[c]) for c, _ in of.pairs()]
    rejected = [DPO_BETA * (p[r] - q[r]) for _, r in of.pairs()]
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
def test_two_ranks_compute_the_loss_of_the_whole_step_dpo(loss: str) -> None:
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


# ---------------------------------------------------------------------------------------------- kto


KTO_BETA, GOOD, BAD = 0.3, 1.5, 0.8
KTO_VALUES = {
    "method": "kto",
    "beta": KTO_BETA,
    "desirable_weight": GOOD,
    "undesirable_weight": BAD,
}
KTO_GROUPS, LABELS = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [1, 0, 1, 1, 0, 0, 0, 0, 0, 0]


def of_step(*, drift: float = 0.1, seed: int = 0) -> Step:
    """Five rows, and five that are only scored; the reference is by `drift` a token less likely."""
    made = step(KTO_GROUPS, LABELS, num_trained=5, seed=seed)
    assert made.scores.reference_N is not None
    made.scores.reference_N.sub_(drift)
    return made


def ratios(of: Step) -> list[torch.Tensor]:
    assert of.scores.reference_N is not None
    policy, reference = of.of_row(of.scores.policy_N), of.of_row(of.scores.reference_N)
    return [p.sum() - q.sum() for p, q in zip(policy, reference, strict=True)]


def by_hand_kto(of: Step) -> torch.Tensor:
    r = ratios(of)
    kl = max(0.0, sum(x.item() for x in r[5:]) / 5)
    total = torch.zeros((), dtype=torch.float64)
    for ratio, label in zip(r[:5], LABELS[:5], strict=True):
        if label:
            total = total + GOOD * (1 - sigmoid(KTO_BETA * (ratio - kl)))
        else:
            total = total + BAD * (1 - sigmoid(KTO_BETA * (kl - ratio)))
    return total / 5


def without_kl(of: Step) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for ratio, label in zip(ratios(of)[:5], LABELS[:5], strict=True):
        total = total + (
            GOOD * (1 - sigmoid(KTO_BETA * ratio)) if label else BAD * sigmoid(KTO_BETA * ratio)
        )
    return total / 5


def test_the_loss_is_the_mean_over_answers_against_the_divergence_of_the_step() -> None:
    of = of_step()
    metrics = assert_is(KTO_VALUES, of, by_hand_kto)
    r = [ratio.item() for ratio in ratios(of)]
    assert metrics["kl"] == pytest.approx(sum(r[5:]) / 5, abs=1e-12)
    assert metrics["kl"] > 0.1
    assert metrics["rewards/chosen"] == pytest.approx(
        KTO_BETA * (r[0] + r[2] + r[3]) / 3, abs=1e-12
    )
    assert metrics["rewards/rejected"] == pytest.approx(KTO_BETA * (r[1] + r[4]) / 2, abs=1e-12)
    margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    assert metrics["rewards/margins"] == pytest.approx(margin, abs=1e-12)
    p = [row.sum().item() for row in of.of_row(of.scores.policy_N)]
    assert metrics["logps/chosen"] == pytest.approx((p[0] + p[2] + p[3]) / 3, abs=1e-12)
    assert metrics["logps/rejected"] == pytest.approx((p[1] + p[4]) / 2, abs=1e-12)


def test_a_divergence_below_zero_is_zero() -> None:
    assert assert_is(KTO_VALUES, of_step(drift=-0.4), by_hand_kto)["kl"] == 0
    assert torch.equal(
        computed(KTO_VALUES, of_step(drift=-0.4))[0],
        computed({**KTO_VALUES, "loss": "apo_zero_unpaired"}, of_step(drift=-0.4))[0],
    )


def test_rows_that_are_only_scored_have_no_gradient() -> None:
    of = of_step()
    _, gradient, _ = computed(KTO_VALUES, of)
    assert gradient[of.scores.rows_N >= 5].eq(0).all()
    assert gradient[of.scores.rows_N < 5].ne(0).all()


def test_without_a_divergence_it_is_apo() -> None:
    metrics = assert_is({**KTO_VALUES, "loss": "apo_zero_unpaired"}, of_step(), without_kl)
    assert "kl" not in metrics


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_two_ranks_compute_the_loss_of_the_whole_step_kto(loss: str) -> None:
    ranks = [0, 1, 1, 0, 0, 1, 0, 1, 1, 0]
    assert_two_ranks_are_one({**KTO_VALUES, "loss": loss}, of_step(), ranks)


@pytest.mark.parametrize(
    ("label", "kind", "other"), [(1, "chosen", "rejected"), (0, "rejected", "chosen")]
)
def test_a_step_of_one_kind_has_a_loss_and_reports_that_kind_only(
    label: int, kind: str, other: str
) -> None:
    of = of_step()
    of = replace(of, rows=replace(of.rows, values_R=torch.full((10,), float(label))))
    loss, gradient, metrics = computed(KTO_VALUES, of)
    assert loss.isfinite()
    assert gradient.abs().sum() > 0
    assert f"rewards/{kind}" in metrics
    assert f"rewards/{other}" not in metrics
    assert "rewards/margins" not in metrics


def test_a_step_without_mismatched_rows_is_refused_if_the_loss_reads_them() -> None:
    of = step([0, 1], [1, 0])
    with pytest.raises(DataError, match="a step of KTO has no prompt with the answer to another"):
        computed(KTO_VALUES, of)
    assert computed({**KTO_VALUES, "loss": "apo_zero_unpaired"}, of)[0].isfinite()


def test_a_label_that_is_neither_is_refused() -> None:
    with pytest.raises(DataError, match=r"a row of a step has the label 0\.5"):
        computed(KTO_VALUES, step([0, 1, 0, 1], [1, 0.5, 0, 0], num_trained=2))


def test_a_divergence_that_is_no_number_makes_the_loss_none() -> None:
    of = of_step()
    of.scores.policy_N.data[-1] = math.nan
    assert computed(KTO_VALUES, of)[0].isnan()


def test_sums_that_are_known_take_the_place_of_the_reference() -> None:
    of = of_step()
    sums_R = torch.stack([q.sum() for q in of.of_row(of.scores.reference_N)])
    values = KTO_VALUES | {"loss": "apo_zero_unpaired"}
    expected, gradient, metrics = computed(values, of)
    known = values | {"reference": "precomputed"}
    rows = replace(of.rows, reference_R=sums_R)
    alone = Step(rows=rows, scores=replace(of.scores, reference_N=None))
    again = computed(known, alone)
    torch.testing.assert_close(again[0], expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(again[1], gradient, rtol=1e-12, atol=0)
    assert again[2] == pytest.approx(metrics, abs=1e-12)
    assert objective(known, rows).reference is None
    assert objective(values, of.rows).reference is not None


@pytest.mark.parametrize("method", ["kto", "dpo", "grpo"])
def test_the_recipe_says_what_is_compared_with_and_not_the_rows(method: str) -> None:
    of = of_step()
    losses = {"grpo": "rloo", "kto": "apo_zero_unpaired", "dpo": "sigmoid"}
    values = {"method": method, "beta": 0.1, "loss": losses[method]}
    rows = replace(of.rows, reference_R=torch.zeros(10))
    assert objective(values, rows).reference is not None
    values |= {"reference": "precomputed"}
    assert objective(values, rows).reference is None
    with pytest.raises(DataError, match="the rows have no log-probabilities of it"):
        objective(values, of.rows)


# ----------------------------------------------------------------------------------- reference free


REFERENCE_FREE_BETA, GAMMA, REFERENCE_FREE_SMOOTHING = 1.3, 0.4, 0.1


def simpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    x = REFERENCE_FREE_BETA * chosen.mean() - REFERENCE_FREE_BETA * rejected.mean() - GAMMA
    return -(1 - REFERENCE_FREE_SMOOTHING) * log_sigmoid(
        x
    ) - REFERENCE_FREE_SMOOTHING * log_sigmoid(-x)


def cpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    x = REFERENCE_FREE_BETA * (chosen.sum() - rejected.sum())
    return -(1 - REFERENCE_FREE_SMOOTHING) * log_sigmoid(
        x
    ) - REFERENCE_FREE_SMOOTHING * log_sigmoid(-x)


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    p, q = chosen.mean().exp(), rejected.mean().exp()
    odds = (p / (1 - p)) / (q / (1 - q))
    return -REFERENCE_FREE_BETA * log_sigmoid(odds.log())


CASES = {
    "simpo": (
        {
            "method": "simpo",
            "beta": REFERENCE_FREE_BETA,
            "gamma": GAMMA,
            "label_smoothing": REFERENCE_FREE_SMOOTHING,
            "sft_weight": 0.6,
        },
        simpo,
        0.6,
    ),
    "cpo": (
        {
            "method": "cpo",
            "beta": REFERENCE_FREE_BETA,
            "label_smoothing": REFERENCE_FREE_SMOOTHING,
            "sft_weight": 0.6,
        },
        cpo,
        0.6,
    ),
    "cpo hinge": (
        {"method": "cpo", "loss": "hinge", "beta": REFERENCE_FREE_BETA},
        lambda c, r: max(torch.zeros(()), 1 - REFERENCE_FREE_BETA * (c.sum() - r.sum())),
        1.0,
    ),
    "cpo ipo": (
        {"method": "cpo", "loss": "ipo", "beta": REFERENCE_FREE_BETA, "sft_weight": 0.0},
        lambda c, r: (c.mean() - r.mean() - 1 / (2 * REFERENCE_FREE_BETA)) ** 2,
        0.0,
    ),
    "orpo": ({"method": "orpo", "beta": REFERENCE_FREE_BETA}, orpo, 1.0),
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
def test_two_ranks_compute_the_loss_of_the_whole_step_reference_free(
    values: dict[str, object],
) -> None:
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
    assert metrics["rewards/chosen"] == pytest.approx(REFERENCE_FREE_BETA * expected, abs=1e-12)


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


# --------------------------------------------------------------------------------------------- grpo


GRPO_GROUPS = [1, 0, 1, 0, 0, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.5, 2.0, 0.25, 0.0, 3.0, 3.0]
GRPO_BETA, LOW, HIGH = 0.2, 0.05, 0.08
GRPO_LOSSES = ("grpo", "dapo", "dr_grpo", "rloo")
MODES = ("none", "ratio", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
GRPO_CASES = [
    (loss, mode)
    for loss in GRPO_LOSSES
    for mode in MODES
    if not (loss == "rloo" and mode.startswith("token"))
]


def settings_grpo(loss: str, mode: str = "none", **more: object) -> dict[str, object]:
    return {
        "method": "grpo",
        "loss": loss,
        "beta": GRPO_BETA,
        "clip_epsilon": LOW,
        "clip_epsilon_high": HIGH,
        "importance_sampling_mode": mode,
    } | more


def of_step_grpo(*, has_sampler: bool = True, apart: float = 1.0) -> Step:
    """Answers of three prompts; the sampler's log-probabilities differ by `apart` times more."""
    made = step(GRPO_GROUPS, REWARDS, has_sampler=has_sampler)
    if made.rows.sampler_N is not None:
        policy_N = made.scores.policy_N.detach()
        made.rows.sampler_N.sub_(policy_N).mul_(apart).add_(policy_N)
    return made


def advantages(loss: str, rewards: list[float]) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        group = [rewards[j] for j in range(len(rewards)) if GRPO_GROUPS[j] == GRPO_GROUPS[i]]
        if loss == "rloo":
            found.append(reward - (sum(group) - reward) / (len(group) - 1))
        else:
            found.append(reward - statistics.mean(group))
            if loss != "dr_grpo":
                found[-1] /= statistics.stdev(group) + 1e-4
    return found


def weight(mode: str, apart: torch.Tensor) -> float:
    ratio = math.exp(apart)
    if mode.endswith("truncate"):
        return min(ratio, 3.0)
    return ratio if ratio <= 3.0 else 0.0


def answer_loss(
    loss: str, mode: str, advantage: float, logps: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The sum over an answer's tokens; of rloo, the answer's."""
    policy, reference, sampler = logps
    fixed = policy.detach()
    old = sampler if mode == "ratio" else fixed
    whole = (policy - old).sum()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(policy)):
        ratio = whole.exp() if loss == "rloo" else (policy[t] - old[t]).exp()
        inside = min(max(ratio, ratio.new_tensor(1 - LOW)), ratio.new_tensor(1 + HIGH))
        gain = min(ratio * advantage, inside * advantage)
        if mode.startswith("token"):
            gain = gain * weight(mode, fixed[t] - sampler[t])
        elif mode.startswith("sequence"):
            gain = gain * weight(mode, (fixed - sampler).sum())
        if loss == "rloo":
            return -gain
        x = reference[t] - policy[t]
        total = total - gain + GRPO_BETA * ratio * (x.exp() - x - 1)
    return total


def by_hand_grpo(loss: str, mode: str, of: Step) -> torch.Tensor:
    sampler_N = of.rows.sampler_N
    policy, reference = of.of_row(of.scores.policy_N), of.of_row(of.scores.reference_N)
    sampler = policy if sampler_N is None else of.of_row(sampler_N)
    rewards = list(REWARDS)
    if loss == "rloo":
        for i in range(len(rewards)):
            rewards[i] -= GRPO_BETA * float((policy[i] - reference[i]).sum().detach())
    losses = [
        answer_loss(loss, mode, advantage, (policy[i], reference[i], sampler[i]))
        for i, advantage in enumerate(advantages(loss, rewards))
    ]
    sizes = [len(row) for row in policy]
    if loss == "grpo":
        return torch.stack([x / n for x, n in zip(losses, sizes, strict=True)]).mean()
    divisors = {"dapo": sum(sizes), "dr_grpo": len(losses) * SEQ_LEN, "rloo": len(losses)}
    return torch.stack(losses).sum() / divisors[loss]


@pytest.mark.parametrize(
    ("loss", "mode"),
    mostly_slow(GRPO_CASES, *((loss, "none") for loss in GRPO_LOSSES), ("dapo", "ratio")),
)
def test_a_loss_is_that_of_its_paper(loss: str, mode: str) -> None:
    of = of_step_grpo()
    assert_is(settings_grpo(loss, mode), of, lambda of: by_hand_grpo(loss, mode, of))


@pytest.mark.parametrize("mode", MODES[2:])
def test_weights_above_three_are_truncated_or_left_out(mode: str) -> None:
    of = of_step_grpo(apart=12.0)
    metrics = assert_is(settings_grpo("dapo", mode), of, lambda of: by_hand_grpo("dapo", mode, of))
    plain = computed(settings_grpo("dapo"), of)
    assert not torch.equal(computed(settings_grpo("dapo", mode), of)[1], plain[1])
    assert of.rows.sampler_N is not None
    apart_N = of.scores.policy_N.detach() - of.rows.sampler_N
    rows = of.of_row(apart_N) if mode.startswith("sequence") else apart_N[:, None]
    assert any(row.sum() > math.log(3) for row in rows), "nothing is truncated"
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(
        apart_N.abs().mean().item(), abs=1e-12
    )


@pytest.mark.parametrize("mode", MODES[2:])
def test_the_largest_weight_is_a_setting(mode: str) -> None:
    of = of_step_grpo(apart=12.0)
    found = {
        cap: computed(settings_grpo("dapo", mode, importance_sampling_cap=cap), of)[2][
            "sampling/importance_sampling_ratio/mean"
        ]
        for cap in (None, 3.0, 0.05, 1e9)
    }
    assert found[None] == found[3.0]
    assert found[0.05] <= 0.05 < found[3.0]
    assert found[1e9] > found[3.0]


def test_ratios_outside_the_range_are_clipped_and_counted() -> None:
    of = of_step_grpo()
    metrics = assert_is(
        settings_grpo("dapo", "ratio"), of, lambda of: by_hand_grpo("dapo", "ratio", of)
    )
    assert of.rows.sampler_N is not None
    ratios = (of.scores.policy_N.detach() - of.rows.sampler_N).exp().tolist()
    signs = [advantages("dapo", REWARDS)[row] for row in of.scores.rows_N.tolist()]
    low = sum(q < 1 - LOW and a < 0 for q, a in zip(ratios, signs, strict=True))
    high = sum(q > 1 + HIGH and a > 0 for q, a in zip(ratios, signs, strict=True))
    assert low
    assert high
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low / len(ratios))
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high / len(ratios))
    assert metrics["clip_ratio/region_mean"] == pytest.approx((low + high) / len(ratios))


def test_rewards_and_divergence_are_reported() -> None:
    of = of_step_grpo()
    _, _, metrics = computed(settings_grpo("dapo"), of)
    assert of.scores.reference_N is not None
    x_N = of.scores.reference_N - of.scores.policy_N.detach()
    assert metrics["kl"] == pytest.approx((x_N.exp() - x_N - 1).mean().item(), abs=1e-12)
    assert metrics["reward"] == pytest.approx(statistics.mean(REWARDS))
    assert metrics["reward_std"] == pytest.approx(statistics.stdev(REWARDS))
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 8)


def test_without_a_divergence_nothing_asks_for_a_reference() -> None:
    of = of_step_grpo()
    values = settings_grpo("dapo", beta=0.0)
    assert objective(values, of.rows).reference is None
    assert objective(settings_grpo("dapo"), of.rows).reference is not None
    alone = replace(of, scores=replace(of.scores, reference_N=None))
    _, gradient, metrics = computed(values, alone)
    assert gradient.abs().sum() > 0
    assert "kl" not in metrics


@pytest.mark.parametrize("loss", GRPO_LOSSES)
def test_two_ranks_compute_the_loss_of_the_whole_step_grpo(loss: str) -> None:
    mode = "sequence_truncate" if loss == "rloo" else "ratio"
    assert_two_ranks_are_one(settings_grpo(loss, mode), of_step_grpo(), [0, 1, 1, 1, 0, 0, 0, 1])


def test_a_prompt_with_one_answer_is_refused() -> None:
    with pytest.raises(DataError, match="group 4 of a step has one answer"):
        computed(settings_grpo("dapo"), step([0, 0, 4], [1, 0, 1]))


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    of = of_step_grpo()
    gradient = computed(settings_grpo("dapo", beta=0.0), of)[1]
    is_equal_N = of.scores.rows_N >= 6
    assert gradient[is_equal_N].eq(0).all()
    assert gradient[~is_equal_N].ne(0).any()


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(DataError, match=f"the value of row 1 of a step is {reward}"):
        computed(settings_grpo("dapo"), step([0, 0, 0], [1, reward, 1]))


def test_a_log_probability_that_is_no_number_makes_the_loss_none_grpo() -> None:
    for loss in GRPO_LOSSES:
        of = of_step_grpo()
        of.scores.policy_N.data[3] = math.nan
        assert computed(settings_grpo(loss), of)[0].isnan()


def test_a_sampler_that_is_not_in_the_rows_is_missed() -> None:
    of = of_step_grpo(has_sampler=False)
    with pytest.raises(DataError, match="the rows have no log-probabilities of the sampler"):
        objective(settings_grpo("dapo", "ratio"), of.rows)
    assert computed(settings_grpo("dapo"), of)[0].isfinite()


# ------------------------------------------------------------------------------------------- reward


MARGINS = {0: 0.0, 1: 0.5, 2: 2.0, 3: 0.25}


def rewards_reward(margins: dict[int, float] | None = None) -> Step:
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


def by_hand_reward(of: Step, margins: dict[int, float], weight: float) -> torch.Tensor:
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
    of = rewards_reward(margins)
    settings = {"method": "reward", "beta": weight}
    assert_is(settings, of, lambda of: by_hand_reward(of, margins, weight))


def test_two_ranks_compute_what_one_does() -> None:
    assert_two_ranks_are_one(
        {"method": "reward", "beta": 0.3}, rewards_reward(MARGINS), [0, 0, 1, 1, 0, 1, 1, 1]
    )


def test_metrics_are_those_of_the_rewards() -> None:
    of = rewards_reward()
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
    of = rewards_reward()
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
    of = rewards_reward()
    of.rows.values_R[of.pairs()[0][0]] = 0.0
    with pytest.raises(DataError, match="has 2 answers with the values 0, 0"):
        objective({"method": "reward"}, of.rows).loss(of.scores)


# ----------------------------------------------------------------------------------------- classify


def step_rows(classes: list[int]) -> StepRows:
    return StepRows(
        groups_R=torch.arange(len(classes)),
        values_R=torch.tensor(classes, dtype=torch.float64),
        num_trained=len(classes),
    )


def scores_of(outputs: torch.Tensor) -> Scores:
    return Scores(
        policy_N=outputs,
        reference_N=None,
        rows_N=torch.arange(len(outputs)),
        num_rows=len(outputs),
    )


def plain_f1(classes: list[int], predicted: list[int]) -> float:
    """By precision and recall of each class that occurs, the other way round than by counts."""
    found = []
    for one in {*classes, *predicted}:
        hits = sum(a == b == one for a, b in zip(classes, predicted, strict=True))
        precision = hits / predicted.count(one) if one in predicted else 0.0
        recall = hits / classes.count(one) if one in classes else 0.0
        both = precision + recall
        found.append(2 * precision * recall / both if both else 0.0)
    return sum(found) / len(found)


def test_f1_is_the_mean_of_precision_and_recall_of_each_class() -> None:
    chance = random.Random(0)
    for _ in range(20):
        classes = [chance.randrange(5) for _ in range(12)]
        predicted = [chance.choice([one, chance.randrange(5)]) for one in classes]
        counts = counts_of(torch.tensor(classes), torch.tensor(predicted), 6)
        assert macro_f1(counts) == pytest.approx(plain_f1(classes, predicted))


def classified(rows: StepRows, exchange: Exchange | None = None) -> Objective:
    return objective({"method": "classify"}, rows, exchange)


def test_the_loss_is_the_cross_entropy_and_accuracy_counts_the_largest_output() -> None:
    outputs = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
    outputs.requires_grad_()
    found = classified(step_rows([0, 2])).loss(scores_of(outputs))
    first = math.log(math.exp(2) + 1 + math.exp(-1)) - 2
    second = math.log(math.exp(0.5) + math.exp(1) + 1)
    assert found.value.item() == pytest.approx((first + second) / 2)
    assert found.metrics["accuracy"] == 0.5
    assert set(found.metrics) == {"accuracy", "f1"}
    found.value.backward()
    assert outputs.grad is not None
    expected = (outputs.detach().softmax(1) - torch.eye(3)[[0, 2]]) / 2
    torch.testing.assert_close(outputs.grad, expected)


def test_ranks_add_up_to_the_whole_step() -> None:
    torch.manual_seed(0)
    outputs, classes = torch.randn(5, 3, dtype=torch.float64), [0, 2, 1, 1, 0]
    whole = classified(step_rows(classes)).loss(scores_of(outputs))
    tables: list[torch.Tensor] = []

    def part(start: int, stop: int, others: list[torch.Tensor]) -> StepLoss:
        def exchange(table: torch.Tensor) -> list[torch.Tensor]:
            tables.append(table)
            return others

        rows = step_rows(classes[start:stop])
        return classified(rows, exchange).loss(scores_of(outputs[start:stop]))

    part(0, 2, [])
    part(2, 5, [])
    first, second = part(0, 2, [tables[1]]), part(2, 5, [tables[0]])
    assert (first.value + second.value).item() == pytest.approx(whole.value.item())
    for name in ("accuracy", "f1"):
        assert first.metrics[name] == second.metrics[name] == whole.metrics[name]


def test_held_out_rows_in_parts_have_the_f1_of_all_rows() -> None:
    torch.manual_seed(1)
    outputs, classes = torch.randn(11, 3, dtype=torch.float64), [0, 2, 1, 1, 0, 0, 0, 2, 1, 0, 2]
    objectives = Objectives(
        section=ObjectiveSection.model_validate({"method": "classify"}), seq_len=8, ranks=Ranks()
    )
    parts = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 11)):
        rows = step_rows(classes[part])
        found = objectives.of_held_out(rows).loss(scores_of(outputs[part]))
        num = len(classes[part])
        evaluation = objectives.evaluation(
            rows,
            label_lens=[1] * num,
            loss=found.value.item(),
            metrics={name: value.item() for name, value in found.metrics.items()},
        )
        weight = objectives.section.weight(num_groups=num, num_rows=num, num_label_tokens=num)
        parts.append((weight, evaluation))
    mean = mean_of(parts, objectives.section)
    predicted = outputs.argmax(1).tolist()
    assert set(mean.metrics) == {"accuracy", "f1"}
    assert mean.metrics["f1"] == pytest.approx(plain_f1(classes, predicted))
    hits = sum(a == b for a, b in zip(classes, predicted, strict=True))
    assert mean.metrics["accuracy"] == pytest.approx(hits / 11)
    loss = torch.nn.functional.cross_entropy(outputs, torch.tensor(classes))
    assert mean.loss == pytest.approx(loss.item())


# ------------------------------------------------------------------------------------------ distill


N, V, K = 9, 16, 4


def known(*, seed: int = 0, mass: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of the model (N, V), the teacher's tokens and log-probabilities (N, K)."""
    generator = torch.Generator().manual_seed(seed)
    logits_NV, teacher_NV = (
        torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    top = (2 * teacher_NV).log_softmax(1).topk(K, dim=1)
    ids_NK, logps_NK = top.indices, top.values + math.log(mass)
    ids_NK[2, 1:], logps_NK[2, 1:] = -1, 0.0
    return logits_NV.requires_grad_(), ids_NK, logps_NK


def scores_of_distill(logits_NV: torch.Tensor, ids_NK: torch.Tensor) -> Scores:
    """Return what the engine would take from logits; labels are token 0."""
    logps_NV = logits_NV.log_softmax(1)
    is_named = torch.stack([torch.tensor([v in row for v in range(V)]) for row in ids_NK.tolist()])
    num = len(logits_NV)
    return Scores(
        policy_N=logps_NV[:, 0],
        reference_N=None,
        rows_N=torch.arange(num) // 3,
        num_rows=-(-num // 3),
        top_NK=logps_NV.gather(1, ids_NK.clamp(min=0)).where(ids_NK >= 0, 0.0),
        others_N=logps_NV.masked_fill(is_named, -torch.inf).logsumexp(1),
    )


def found_loss(
    values: dict[str, Any],
    logits_NV: torch.Tensor,
    ids_NK: torch.Tensor,
    logps_NK: torch.Tensor,
    exchange: Exchange | None = None,
) -> StepLoss:
    scores = scores_of_distill(logits_NV, ids_NK)
    rows = StepRows(
        groups_R=torch.arange(scores.num_rows),
        values_R=torch.ones(scores.num_rows, dtype=torch.float64),
        num_trained=scores.num_rows,
        top_ids_NK=ids_NK,
        top_logps_NK=logps_NK,
    )
    section = ObjectiveSection.model_validate({"method": "distill", **values})
    return section.objective(StepData(rows=rows, seq_len=8, exchange=exchange)).loss(scores)


def by_hand_distill(
    values: dict[str, Any], logits_NV: torch.Tensor, ids_NK: torch.Tensor, logps_NK: torch.Tensor
) -> torch.Tensor:
    t, losses = values.get("temperature", 1.0), []
    for logits_V, ids, logps in zip(logits_NV, ids_NK.tolist(), logps_NK.tolist(), strict=True):
        q_V = logits_V.softmax(0)
        pairs = [(math.exp(logp), q_V[i]) for i, logp in zip(ids, logps, strict=True) if i >= 0]
        if values.get("loss", "kl") == "kl":
            pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
        else:
            of_p, of_q = sum(p ** (1 / t) for p, _ in pairs), sum(q ** (1 / t) for _, q in pairs)
            pairs = [(p ** (1 / t) / of_p, q ** (1 / t) / of_q) for p, q in pairs]
        kl = sum(p * (math.log(p) - q.log()) for p, q in pairs)
        losses.append(t**2 * kl - values.get("sft_weight", 0.0) * q_V[0].log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sft_weight": 0.5},
        {"loss": "kl_top"},
        {"loss": "kl_top", "temperature": 2.5, "sft_weight": 0.1},
    ],
)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(values: dict[str, Any]) -> None:
    logits_NV, ids_NK, logps_NK = known()
    value = found_loss(values, logits_NV, ids_NK, logps_NK).value
    expected = by_hand_distill(values, logits_NV, ids_NK, logps_NK)
    (gradient,) = torch.autograd.grad(value, logits_NV)
    (truth,) = torch.autograd.grad(expected, logits_NV)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-14)
    assert truth.abs().sum() > 0.1


def test_a_teacher_of_the_whole_vocabulary_gives_the_whole_divergence() -> None:
    logits_NV, _, _ = known()
    teacher_NV = torch.randn(N, V, dtype=torch.float64).log_softmax(1)
    ordered = teacher_NV.sort(dim=1, descending=True)
    logps_NK = ordered.values.float()  # rounded, so that they do not add up to 1
    for name in ("kl", "kl_top"):
        value = found_loss({"loss": name}, logits_NV, ordered.indices, logps_NK).value
        whole = torch.nn.functional.kl_div(
            logits_NV.log_softmax(1), teacher_NV, log_target=True, reduction="batchmean"
        )
        assert value.item() == pytest.approx(whole.item(), rel=1e-5)
        (gradient,) = torch.autograd.grad(value, logits_NV, retain_graph=True)
        (truth,) = torch.autograd.grad(whole, logits_NV)
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-7)


def test_a_model_that_agrees_on_each_given_token_has_no_loss_and_no_gradient() -> None:
    logits_NV, ids_NK, logps_NK = known()
    own_NK = logits_NV.detach().log_softmax(1).gather(1, ids_NK.clamp(min=0))
    agreed = found_loss({}, logits_NV, ids_NK, own_NK)
    assert agreed.value.item() == pytest.approx(0, abs=1e-14)
    (gradient,) = torch.autograd.grad(agreed.value, logits_NV)
    assert gradient.abs().max() < 1e-14
    assert agreed.metrics["top_1_agreement"] == 1
    mass = agreed.metrics["teacher_top_k_mass"]
    assert mass == pytest.approx(agreed.metrics["student_top_k_mass"].item())
    assert found_loss({}, logits_NV, ids_NK, logps_NK).value > 0


def test_probabilities_that_rounding_made_more_than_1_are_scaled() -> None:
    logits_NV, ids_NK, logps_NK = known(mass=1.5)
    found = found_loss({}, logits_NV, ids_NK, logps_NK)
    is_over = logps_NK.exp().where(ids_NK >= 0, 0.0).sum(1) > 1
    assert is_over.any()
    assert found.value.isfinite()
    assert found.metrics["teacher_top_k_mass"] <= 1


def _given(tables: Sequence[torch.Tensor], _: torch.Tensor) -> Sequence[torch.Tensor]:
    return tables


def test_two_ranks_give_the_loss_gradient_and_metrics_of_one() -> None:
    logits_NV, ids_NK, logps_NK = known()
    values = {"sft_weight": 0.3}
    whole = found_loss(values, logits_NV, ids_NK, logps_NK)
    (expected,) = torch.autograd.grad(whole.value, logits_NV)
    parts = [slice(0, 3), slice(3, N)]
    tables: list[torch.Tensor] = []

    def hand_over(table: torch.Tensor) -> Sequence[torch.Tensor]:
        tables.append(table)
        return ()

    for part in parts:
        found_loss(values, logits_NV[part], ids_NK[part], logps_NK[part], hand_over)
    found = []
    for part, other in zip(parts, reversed(tables), strict=True):
        theirs: list[torch.Tensor] = [other]
        parts_of = logits_NV[part], ids_NK[part], logps_NK[part]
        found.append(found_loss(values, *parts_of, partial(_given, theirs)))
    assert sum(one.value.item() for one in found) == pytest.approx(whole.value.item(), rel=1e-13)
    gradient = sum(torch.autograd.grad(one.value, logits_NV)[0] for one in found)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    for one in found:
        for name, value in whole.metrics.items():
            assert one.metrics[name].item() == pytest.approx(value.item(), rel=1e-12), name


# ----------------------------------------------------------------------------------------- features


def test_features_are_read_by_row_in_any_order() -> None:
    table = Features(num_rows=4, max_features=9, dtype=torch.float32)
    table.add((2, 0), [1, 3], torch.tensor([[20.0], [0.0], [1.0], [2.0]]))
    table.add((3, 1), [2, 1], torch.tensor([[30.0], [31.0], [10.0]]))
    values, rows = table.of((3, 0, 2))
    assert values.flatten().tolist() == [30, 31, 0, 1, 2, 20]
    assert rows.tolist() == [0, 0, 1, 1, 1, 2]
    assert table.num == 7
    assert table.num_bytes == 7 * 4


def test_a_head_returns_what_it_reads_only_meanwhile() -> None:
    head, values = nn.Linear(3, 2), torch.ones(4, 3)
    hook = PassThrough(head)
    with hook.on():
        assert head(values) is values
    assert head(values).shape == (4, 2)
