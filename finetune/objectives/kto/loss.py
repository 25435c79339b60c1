"""The loss of single answers that are desired or not: Kahneman-Tversky optimisation."""

from dataclasses import dataclass

import torch

from finetune.data.step_rows import RowSums, SectionObjective
from finetune.errors import DataError
from finetune.objectives.kto import Kto
from offload.engine.objective import Scores, StepLoss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KtoObjective(SectionObjective):
    """The mean over all answers of a step of how far each is from where it should be.

    With r = log(p / p_ref) of an answer, b beta and s the logistic function, the loss of a desired
    answer is w_d (1 - s(b (r - k))) and that of another w_u (1 - s(b (k - r))). k is the mean of r
    over the rows that are only scored, prompts of the step with answers to other prompts, or 0
    where that is negative; it has no gradient. Source: arXiv:2402.01306.

    Without k the loss of an undesired answer is w_u s(b r): apo_zero_unpaired, arXiv:2408.06266
    eq. 7 for single answers.
    """

    section: Kto

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The scores of all rows of the step.

        Raises:
            DataError: A label is neither 0 nor 1, or no row is there to take k from.
        """
        section, sums = self.section, self.sums(scores)
        trained = sums.is_trained_A.nonzero()[:, 0]
        labels = sums.values_A[trained]
        wrong = labels[(labels != 0) & (labels != 1)]
        if len(wrong):
            raise DataError(
                f"a row of a step has the label {wrong[0].item():g}",
                limit="1 is for desired answers, 0 for others",
                hint="correct the row",
            )
        ratios = sums.log_ratios[trained]
        kl = self._kl(sums)
        signs = 2 * labels - 1
        weights = labels * section.desirable_weight + (1 - labels) * section.undesirable_weight
        losses = weights * (-signs * section.beta * (ratios - kl)).sigmoid()
        metrics = self._metrics(ratios.detach(), sums.policy_A[trained].detach(), labels)
        return StepLoss(
            value=sums.own_part(losses.mean()),
            metrics={**metrics, "kl": kl} if section.scores_mismatched else metrics,
        )

    def _kl(self, sums: RowSums) -> torch.Tensor:
        """Return k."""
        if not self.section.scores_mismatched:
            return torch.zeros((), dtype=torch.float64)
        scored = ~sums.is_trained_A
        if not bool(scored.any()):
            raise DataError(
                "a step of KTO has no prompt with the answer to another one",
                limit="its KL divergence is taken from such rows, so a step has two rows or more",
                hint="`train.grad_accum_steps: 8`, or `objective.loss: apo_zero_unpaired`",
            )
        return sums.log_ratios[scored].detach().mean().clamp(min=0)

    def _metrics(
        self, ratios: torch.Tensor, logps: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return means over desired and over other answers, of the kinds that there are.

        Args:
            ratios: r of each answer.
            logps: Its log-probability.
            labels: 1 where it is desired, else 0.
        """
        metrics: dict[str, torch.Tensor] = {}
        for name, label in (("chosen", 1), ("rejected", 0)):
            of_kind = labels == label
            if bool(of_kind.any()):
                metrics[f"rewards/{name}"] = self.section.beta * ratios[of_kind].mean()
                metrics[f"logps/{name}"] = logps[of_kind].mean()
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics
