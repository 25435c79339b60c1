"""The loss of classes, macro F1 from counts, and what ranks and parts of the rows add up to."""

import math
import random

import pytest
import torch

from finetune.objective.classify import ClassifyObjective, counts_of, macro_f1
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from finetune.training.objectives import Objectives, mean_of
from finetune.training.ranks import Ranks
from offload.engine.objective import Scores, StepLoss


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


def test_the_loss_is_the_cross_entropy_and_accuracy_counts_the_largest_output() -> None:
    outputs = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
    outputs.requires_grad_()
    found = ClassifyObjective(rows=step_rows([0, 2])).loss(scores_of(outputs))
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
    whole = ClassifyObjective(rows=step_rows(classes)).loss(scores_of(outputs))
    tables: list[torch.Tensor] = []

    def part(start: int, stop: int, others: list[torch.Tensor]) -> StepLoss:
        def exchange(table: torch.Tensor) -> list[torch.Tensor]:
            tables.append(table)
            return others

        rows = step_rows(classes[start:stop])
        return ClassifyObjective(rows=rows, exchange=exchange).loss(scores_of(outputs[start:stop]))

    part(0, 2, [])
    part(2, 5, [])
    first, second = part(0, 2, [tables[1]]), part(2, 5, [tables[0]])
    assert (first.value + second.value).item() == pytest.approx(whole.value.item())
    for name in ("accuracy", "f1"):
        assert first.metrics[name] == second.metrics[name] == whole.metrics[name]


def test_held_out_rows_in_parts_have_the_f1_of_all_rows() -> None:
    torch.manual_seed(1)
    outputs, classes = torch.randn(11, 3, dtype=torch.float64), [0, 2, 1, 1, 0, 0, 0, 2, 1, 0, 2]
    objectives = Objectives(section=ObjectiveSection(method="classify"), seq_len=8, ranks=Ranks())
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
        weight = objectives.weight(num_groups=num, num_rows=num, num_label_tokens=num)
        parts.append((weight, evaluation))
    mean = mean_of(parts)
    predicted = outputs.argmax(1).tolist()
    assert set(mean.metrics) == {"accuracy", "f1"}
    assert mean.metrics["f1"] == pytest.approx(plain_f1(classes, predicted))
    hits = sum(a == b for a, b in zip(classes, predicted, strict=True))
    assert mean.metrics["accuracy"] == pytest.approx(hits / 11)
    loss = torch.nn.functional.cross_entropy(outputs, torch.tensor(classes))
    assert mean.loss == pytest.approx(loss.item())
