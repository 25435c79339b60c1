"""What held-out rows say is the same however they are cut into parts."""

import pytest
import torch

from finetune.objective.kto import KtoObjective
from finetune.objective.step_rows import StepRows
from finetune.recipe.objective_section import ObjectiveSection
from finetune.training.objectives import Evaluation, Objectives, mean_of, num_parts
from finetune.training.ranks import Ranks
from offload.engine.objective import Scores


def test_rewards_of_desired_answers_are_means_over_these_answers() -> None:
    policy = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0, -32.0])
    labels = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    kto = Objectives(section=ObjectiveSection(method="kto"), seq_len=8, ranks=Ranks())

    def said(part: slice) -> tuple[int, Evaluation]:
        num = len(policy[part])
        rows = StepRows(groups_R=torch.arange(num), values_R=labels[part], num_trained=num)
        objective = KtoObjective(
            rows=rows, beta=0.5, desirable_weight=1.0, undesirable_weight=1.0, has_kl=False
        )
        scores = Scores(
            policy_N=policy[part],
            reference_N=torch.zeros(num),
            rows_N=torch.arange(num),
            num_rows=num,
        )
        found = objective.loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        loss, counts = found.value.item(), kto.counts(rows)
        return num, Evaluation(loss=loss, metrics=metrics, counts=counts)

    _, whole = said(slice(0, 6))
    cut = mean_of([said(slice(0, 4)), said(slice(4, 6))])
    assert cut.metrics == pytest.approx(whole.metrics)
    assert cut.loss == pytest.approx(whole.loss)
    assert whole.metrics["rewards/chosen"] == pytest.approx(0.5 * -23 / 4)


@pytest.mark.parametrize(
    ("num_groups", "per_part", "num"),
    [(16, 8, 2), (15, 8, 2), (17, 8, 3), (3, 8, 1), (3, 2, 1), (1, 2, 1), (5, 1, 5)],
)
def test_parts_of_held_out_rows_are_no_larger_than_a_step(
    num_groups: int, per_part: int, num: int
) -> None:
    assert num_parts(num_groups, per_part) == num
