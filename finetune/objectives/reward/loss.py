"""The loss of reward models: pairs of answers, and one number for each of them."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from finetune.data.step_rows import SectionObjective
from finetune.objectives._pairs import paired
from finetune.objectives.reward import Reward
from offload.engine.objective import Scores, StepLoss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardObjective(SectionObjective):
    """Bradley and Terry's likelihood of each pair, by the rewards of its answers.

    With rewards c and r of the chosen and the rejected answer, and the margin m of a pair, the loss
    of a step is the mean over its pairs of -log s(c - r - m), and w times the mean of (c + r)^2.
    The likelihood knows differences alone; the second term keeps rewards around 0.

    Source: arXiv:2203.02155 eq. 1 for pairs; margins as arXiv:2307.09288 eq. 2; the second term of
    arXiv:2312.09244. All as in trl 1.16.0, trainer/reward_trainer.py, `compute_loss`.
    """

    section: Reward

    @property
    def output_index(self) -> int:
        """The only output of the head."""
        return 0

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The reward of each row, at its last token.

        Raises:
            DataError: Rows of a group are not one chosen and one rejected answer.
        """
        sums, center_weight = self.sums(scores), self.section.beta
        chosen, rejected = paired(sums)
        better_P, worse_P = sums.policy_A[chosen], sums.policy_A[rejected]
        apart_P = better_P - worse_P
        loss = -functional.logsigmoid(apart_P - (sums.values_A[chosen] - 1)).mean()
        if center_weight:
            loss = loss + center_weight * (better_P + worse_P).square().mean()
        all_R = torch.cat((better_P, worse_P))
        metrics = {
            "rewards/chosen": better_P.mean(),
            "rewards/rejected": worse_P.mean(),
            "rewards/accuracies": (apart_P > 0).double().mean(),
            "rewards/margins": apart_P.mean(),
            "rewards/mean": all_R.mean(),
            "rewards/min": all_R.min(),
            "rewards/max": all_R.max(),
        }
        return StepLoss(
            value=sums.own_part(loss),
            metrics={name: value.detach() for name, value in metrics.items()},
        )
