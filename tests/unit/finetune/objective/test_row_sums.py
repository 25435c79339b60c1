"""The rows of a step, of all ranks: sums by row, and which rows belong together."""

from dataclasses import replace

import pytest
import torch

from finetune.objective.pairs import ordered, row_sums, summed
from finetune.objective.step_rows import StepRows
from offload.engine.objective import Scores
from tests.unit.finetune.objective.step import assert_two_ranks_are_one, computed, step


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
