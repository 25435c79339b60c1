"""Losses of pairs of answers: what they read of a pair, and what all of them report.

P pairs of the step, those of all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from finetune.data.step_rows import RowSums, SectionObjective, ordered
from finetune.errors import DataError
from finetune.objectives._settings import Paired
from offload.engine.objective import Scores, StepLoss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs:
    """The pairs of a step."""

    chosen_P: torch.Tensor  # log-probability of each chosen answer, of all its tokens or their mean
    rejected_P: torch.Tensor  # the log-probability of each rejected answer
    # The log-probability of each chosen answer by the reference; zeros without one.
    chosen_reference_P: torch.Tensor
    # The log-probability of each rejected answer by the reference.
    rejected_reference_P: torch.Tensor
    chosen_tokens_P: torch.Tensor  # label tokens of each chosen answer
    rejected_tokens_P: torch.Tensor  # the number of label tokens of each rejected answer

    @property
    def chosen_ratios(self) -> torch.Tensor:
        """The log of how much likelier the chosen answer is than by the reference."""
        return self.chosen_P - self.chosen_reference_P

    @property
    def rejected_ratios(self) -> torch.Tensor:
        """The same of the rejected answer."""
        return self.rejected_P - self.rejected_reference_P

    @property
    def differences(self) -> torch.Tensor:
        """By how much the first is larger than the second."""
        return self.chosen_ratios - self.rejected_ratios


PairLoss = Callable[[Pairs], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairObjective(SectionObjective):
    """The mean of a loss over all pairs of a step, and cross-entropy of the chosen answers."""

    section: Paired

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The scores of all rows of the step.

        Raises:
            DataError: Rows of a group are not one chosen and one rejected answer.
        """
        section, sums = self.section, self.sums(scores)
        chosen, rejected = paired(sums)
        divisors_A = sums.tokens_A if section.is_averaged else torch.ones_like(sums.tokens_A)
        policy_A, reference_A = sums.policy_A / divisors_A, sums.reference_A / divisors_A
        pairs = Pairs(
            chosen_P=policy_A[chosen],
            rejected_P=policy_A[rejected],
            chosen_reference_P=reference_A[chosen],
            rejected_reference_P=reference_A[rejected],
            chosen_tokens_P=sums.tokens_A[chosen],
            rejected_tokens_P=sums.tokens_A[rejected],
        )
        loss = section.loss_of()(pairs).mean()
        metrics = {**_metrics(pairs, section.beta), **section.more_metrics(pairs)}
        if section.nll_weight:
            nll = -sums.policy_A[chosen].sum() / sums.tokens_A[chosen].sum()
            loss = loss + section.nll_weight * nll
            metrics["nll_loss"] = nll
        return StepLoss(
            value=sums.own_part(loss),
            metrics={name: value.detach() for name, value in metrics.items()},
        )


def paired(sums: RowSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen and the rejected row of each pair, by number of the pair.

    Raises:
        DataError: Rows of a group are not one chosen and one rejected answer.
    """
    groups = ordered(sums)
    for group in groups:
        values = sums.values_A[group].tolist()
        if len(values) != 2 or values[0] == values[1]:
            raise DataError(
                f"group {int(sums.groups_A[group[0]])} of a step has {len(values)} answers with"
                f" the values {', '.join(f'{value:g}' for value in values)}",
                limit="the loss compares one chosen with one rejected answer",
                hint="correct the row; `objective.loss: plackett_luce` ranks more than two",
            )
    chosen, rejected = torch.stack(groups).unbind(1)
    return chosen, rejected


def _metrics(pairs: Pairs, beta: float) -> dict[str, torch.Tensor]:
    """Return what users know of pairs, under the names that they know."""
    chosen_P, rejected_P = beta * pairs.chosen_ratios, beta * pairs.rejected_ratios
    return {
        "rewards/chosen": chosen_P.mean(),
        "rewards/rejected": rejected_P.mean(),
        "rewards/accuracies": (chosen_P > rejected_P).double().mean(),
        "rewards/margins": (chosen_P - rejected_P).mean(),
        "logps/chosen": pairs.chosen_P.mean(),
        "logps/rejected": pairs.rejected_P.mean(),
    }


def smoothed(x_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-(1 - e) log s(x) - e log s(-x)."""
    right_P, wrong_P = -functional.logsigmoid(x_P), -functional.logsigmoid(-x_P)
    return (1 - smoothing) * right_P + smoothing * wrong_P
