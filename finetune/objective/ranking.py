"""The loss of rankings: DPO where a prompt has more than two answers, in an order."""

from dataclasses import dataclass

import torch

from finetune.errors import DataError
from finetune.objective.row_sums import Exchange, ordered, row_sums
from finetune.objective.step_rows import StepRows
from offload.engine.objective import Reference, Scores, StepLoss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankingObjective:
    """Plackett and Luce's likelihood of each ranking, by the rewards of its answers.

    With rewards s = b log(p / p_ref), the loss of a ranking is the sum over its answers k of
    log(exp(s_k) + sum of exp(s_j) over the answers j that are worse than k) - s_k: answers that are
    equally good are not compared with each other. That of a step is the mean over its rankings, and
    cross-entropy of the best answers. For two answers it is that of DPO (arXiv:2305.18290, appendix
    A.3), for one good one and several bad ones that of S-DPO (arXiv:2406.09215).

    Attributes:
        rows: What the step's rows are to each other.
        beta: b.
        sft_weight: Weight of the mean cross-entropy of the best answers' tokens.
        exchange: Gets the rows of the other ranks.
    """

    rows: StepRows
    beta: float
    sft_weight: float
    exchange: Exchange | None = None

    @property
    def reference(self) -> Reference | None:
        """The base, unless its log-probabilities are known."""
        return self.rows.reference

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: Of all its rows.

        Raises:
            DataError: No answer of a ranking is better than another.
        """
        sums = row_sums(scores, self.rows, self.exchange, has_reference=True)
        rewards_A = self.beta * sums.log_ratios
        losses, rights, margins, best, worst = [], [], [], [], []
        for group in ordered(sums):
            values = sums.values_A[group]
            is_worse = values[:, None] > values[None, :]
            if not bool(is_worse.any()):
                raise DataError(
                    f"group {int(sums.groups_A[group[0]])} of a step has {len(group)} answers with"
                    f" the values {', '.join(f'{value:g}' for value in values.tolist())}",
                    limit="a ranking has an answer that is better than another",
                    hint="correct the row",
                )
            rewards = rewards_A[group]
            is_left = is_worse | torch.eye(len(group), dtype=torch.bool)
            left = rewards.expand_as(is_left).where(is_left, -torch.inf)
            losses.append((left.logsumexp(1) - rewards).sum())
            better, other = is_worse.nonzero(as_tuple=True)
            rights.append((rewards[better] > rewards[other]).double().mean())
            margins.append(rewards[0] - rewards[-1])
            best.append(group[0])
            worst.append(group[-1])
        first, last = torch.stack(best), torch.stack(worst)
        loss = torch.stack(losses).mean()
        metrics = {
            "rewards/chosen": rewards_A[first].mean(),
            "rewards/rejected": rewards_A[last].mean(),
            "rewards/accuracies": torch.stack(rights).mean(),
            "rewards/margins": torch.stack(margins).mean(),
            "logps/chosen": sums.policy_A[first].mean(),
            "logps/rejected": sums.policy_A[last].mean(),
        }
        if self.sft_weight:
            nll = -sums.policy_A[first].sum() / sums.tokens_A[first].sum()
            loss = loss + self.sft_weight * nll
            metrics["nll_loss"] = nll
        return StepLoss(
            value=sums.own_part(loss),
            metrics={name: value.detach() for name, value in metrics.items()},
        )
