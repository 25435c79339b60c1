"""What held-out rows say is the same however they are cut into parts."""

from typing import Any

import pytest
import torch

from finetune.data.steps import num_parts
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from finetune.run.run_files import Evaluation
from finetune.training.objectives import Objectives, mean_of
from finetune.training.ranks import Ranks
from offload.engine.objective import Scores


def test_rewards_of_desired_answers_are_means_over_these_answers() -> None:
    policy = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0, -32.0])
    labels = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    section = ObjectiveSection(method="kto", loss="apo_zero_unpaired", beta=0.5)
    kto = Objectives(section=section, seq_len=8, ranks=Ranks())

    def said(part: slice) -> tuple[int, Evaluation]:
        num = len(policy[part])
        rows = StepRows(groups_R=torch.arange(num), values_R=labels[part], num_trained=num)
        objective = kto.of_held_out(rows)
        scores = Scores(
            policy_N=policy[part],
            reference_N=torch.zeros(num),
            rows_N=torch.arange(num),
            num_rows=num,
        )
        found = objective.loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        lens, loss = [1] * num, found.value.item()
        return num, kto.evaluation(rows, label_lens=lens, loss=loss, metrics=metrics)

    _, whole = said(slice(0, 6))
    cut = mean_of([said(slice(0, 4)), said(slice(4, 6))])
    assert cut.metrics == pytest.approx(whole.metrics)
    assert cut.loss == pytest.approx(whole.loss)
    assert whole.metrics["rewards/chosen"] == pytest.approx(0.5 * -23 / 4)


PAIR_LENS = [3, 5, 1, 9, 20, 2, 7, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "orpo"},
        {"method": "cpo"},
        {"method": "simpo", "sft_weight": 0.5},
        {"method": "dpo", "sft_weight": 2.0},
        {"method": "dpo", "loss": "plackett_luce", "sft_weight": 1.0},
    ],
)
def test_cross_entropy_of_held_out_answers_is_a_mean_over_their_tokens(
    settings: dict[str, Any],
) -> None:
    of_run = Objectives(
        section=ObjectiveSection.model_validate(settings), seq_len=32, ranks=Ranks()
    )
    rng = torch.Generator().manual_seed(0)
    logps = [-3 * torch.rand(num, generator=rng, dtype=torch.float64) for num in PAIR_LENS]
    values = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])

    def said(rows: list[int]) -> tuple[int, Evaluation]:
        step_rows = StepRows(
            groups_R=torch.arange(len(rows)) // 2, values_R=values[rows], num_trained=len(rows)
        )
        lens = [PAIR_LENS[row] for row in rows]
        policy_N = torch.cat([logps[row] for row in rows])
        scores = Scores(
            policy_N=policy_N,
            reference_N=0.9 * policy_N,
            rows_N=torch.arange(len(rows)).repeat_interleave(torch.tensor(lens)),
            num_rows=len(rows),
        )
        found = of_run.of_held_out(step_rows).loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        loss = found.value.item()
        evaluation = of_run.evaluation(step_rows, label_lens=lens, loss=loss, metrics=metrics)
        return len(rows) // 2, evaluation

    chosen = torch.cat([logps[row] for row in (0, 3, 4, 6)])
    whole = said(list(range(8)))[1]
    assert whole.metrics["nll_loss"] == pytest.approx(-chosen.mean().item(), rel=1e-12)
    cut = mean_of([said([0, 1]), said([2, 3, 4, 5]), said([6, 7])])
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)


@pytest.mark.parametrize(
    ("num_groups", "per_part", "num"),
    [(16, 8, 2), (15, 8, 2), (17, 8, 3), (3, 8, 1), (3, 2, 1), (1, 2, 1), (5, 1, 5)],
)
def test_parts_of_held_out_rows_are_no_larger_than_a_step(
    num_groups: int, per_part: int, num: int
) -> None:
    assert num_parts(num_groups, per_part) == num


def test_the_least_and_the_largest_reward_are_those_of_all_parts() -> None:
    def part(least: float, largest: float) -> Evaluation:
        metrics = {"rewards/min": least, "rewards/mean": 1.0, "rewards/max": largest}
        return Evaluation(loss=1.0, metrics=metrics)

    found = mean_of([(3, part(-2.0, 1.0)), (1, part(-1.0, 4.0))])
    assert found.metrics == {"rewards/min": -2.0, "rewards/mean": 1.0, "rewards/max": 4.0}


SIZES = [2, 4, 3, 2]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "rloo"])
def test_what_held_out_samples_say_is_weighted_by_answers_and_tokens(loss: str) -> None:
    settings = {"beta": 0.1, "importance_sampling_mode": "ratio", "clip_epsilon": 0.05}
    section = ObjectiveSection.model_validate({"method": "grpo", "loss": loss} | settings)
    grpo = Objectives(section=section, seq_len=32, ranks=Ranks())
    rng = torch.Generator().manual_seed(0)
    groups = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    values = torch.rand(len(groups), generator=rng, dtype=torch.float64)
    lens = torch.randint(1, 20, (len(groups),), generator=rng).tolist()
    logps = [-3 * torch.rand(num, generator=rng, dtype=torch.float64) for num in lens]

    def said(of: list[int]) -> tuple[int, Evaluation]:
        rows = [row for row, group in enumerate(groups.tolist()) if group in of]
        own = [lens[row] for row in rows]
        policy_N = torch.cat([logps[row] for row in rows])
        step_rows = StepRows(
            groups_R=groups[rows] - min(of),
            values_R=values[rows],
            num_trained=len(rows),
            sampler_N=policy_N - 0.2 * torch.sin(40 * policy_N),
        )
        scores = Scores(
            policy_N=policy_N,
            reference_N=0.9 * policy_N,
            rows_N=torch.arange(len(rows)).repeat_interleave(torch.tensor(own)),
            num_rows=len(rows),
        )
        found = grpo.of_held_out(step_rows).loss(scores)
        metrics = {name: value.item() for name, value in found.metrics.items()}
        evaluation = grpo.evaluation(
            step_rows, label_lens=own, loss=found.value.item(), metrics=metrics
        )
        num = grpo.weight(num_groups=len(of), num_rows=len(rows), num_label_tokens=sum(own))
        return num, evaluation

    whole = said([0, 1, 2, 3])[1]
    assert {"kl", "clip_ratio/region_mean", "reward_std", "logps/accuracies"} <= {*whole.metrics}
    cut = mean_of([said([0]), said([1, 2]), said([3])])
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-12)
