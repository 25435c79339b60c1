"""Losses of pairs against a reference: direct preference optimisation and its kin.

Of a pair, r_c and r_r are the log-ratios log(p(answer) / p_ref(answer)) of the chosen and the
rejected answer, summed over their tokens, d = r_c - r_r, b is beta and e the label smoothing. Names
of losses are TRL's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from finetune.data.step_rows import SectionObjective, ordered
from finetune.errors import DataError
from finetune.objectives._pairs import Pairs, smoothed
from finetune.objectives.dpo import Dpo
from offload.engine.objective import Scores, StepLoss

DISCOPOP_TAU = 0.05


def sigmoid(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """-(1 - e) log s(b d) - e log s(-b d); e > 0 is conservative DPO.

    Source: arXiv:2305.18290 eq. 7; smoothing as in Mitchell's note on DPO with noisy labels.
    """
    return smoothed(beta * pairs.differences, smoothing)


def hinge(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """max(0, 1 - b d). Source: arXiv:2305.10425 (SLiC) on log-ratios, as arXiv:2309.06657."""
    return torch.relu(1 - beta * pairs.differences)


def ipo(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """(d' - 1 / (2 b))^2, d' of log-ratios that are means over tokens.

    Source: arXiv:2310.12036 eq. 17; the means as TRL has them.
    """
    return (_mean_differences(pairs) - 1 / (2 * beta)) ** 2


def ipo_of_means(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """The same of pairs whose log-probabilities are means already."""
    return (pairs.differences - 1 / (2 * beta)) ** 2


def robust(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """(-(1 - e) log s(b d) + e log s(-b d)) / (1 - 2 e). Source: arXiv:2403.00409."""
    x_P = beta * pairs.differences
    right_P, wrong_P = -functional.logsigmoid(x_P), -functional.logsigmoid(-x_P)
    return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)


def sigmoid_norm(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """-log s(b d'), d' of log-ratios that are means over tokens. Source: arXiv:2411.15124."""
    return -functional.logsigmoid(beta * _mean_differences(pairs))


def exo_pair(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """KL of (s(b d), s(-b d)) from (1 - e, e). Source: arXiv:2402.00856 eq. 16."""
    x_P = beta * pairs.differences
    right_P = x_P.sigmoid() * (functional.logsigmoid(x_P) - math.log1p(-smoothing))
    wrong_P = (-x_P).sigmoid() * (functional.logsigmoid(-x_P) - math.log(smoothing))
    return right_P + wrong_P


def nca_pair(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """-log s(b r_c) - (log s(-b r_c) + log s(-b r_r)) / 2. Source: arXiv:2402.05369."""
    chosen_P, rejected_P = beta * pairs.chosen_ratios, beta * pairs.rejected_ratios
    both_P = functional.logsigmoid(-chosen_P) + functional.logsigmoid(-rejected_P)
    return -functional.logsigmoid(chosen_P) - both_P / 2


def bco_pair(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """-log s(b r_c) - log s(-b r_r), without the paper's shift. Source: arXiv:2404.04656."""
    chosen_P, rejected_P = beta * pairs.chosen_ratios, beta * pairs.rejected_ratios
    return -functional.logsigmoid(chosen_P) - functional.logsigmoid(-rejected_P)


def sppo_hard(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """(r_c - 1 / (2 b))^2 + (r_r + 1 / (2 b))^2.

    Source: arXiv:2405.00675 eq. 4.7, with a probability of 1 that the chosen answer wins.
    """
    return (pairs.chosen_ratios - 0.5 / beta) ** 2 + (pairs.rejected_ratios + 0.5 / beta) ** 2


def aot(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """DPO between sorted differences: those of the policy, and those of the reference.

    The differences of log-probabilities of all pairs of the step are sorted by the policy, and by
    the reference, and compared in this order. Source: arXiv:2406.05882.
    """
    policy_P, _ = (pairs.chosen_P - pairs.rejected_P).sort()
    reference_P, _ = (pairs.chosen_reference_P - pairs.rejected_reference_P).sort()
    return smoothed(beta * (policy_P - reference_P), smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """DPO between the sorted log-ratios of chosen and of rejected answers of the step.

    Source: arXiv:2406.05882.
    """
    chosen_P, _ = pairs.chosen_ratios.sort()
    rejected_P, _ = pairs.rejected_ratios.sort()
    return smoothed(beta * (chosen_P - rejected_P), smoothing)


def apo_zero(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """1 - s(b r_c) + s(b r_r). Source: arXiv:2408.06266 eq. 7."""
    return (-beta * pairs.chosen_ratios).sigmoid() + (beta * pairs.rejected_ratios).sigmoid()


def apo_down(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """s(b r_c) + 1 - s(b d). Source: arXiv:2408.06266 eq. 8."""
    return (beta * pairs.chosen_ratios).sigmoid() + (-beta * pairs.differences).sigmoid()


def discopop(pairs: Pairs, *, beta: float, smoothing: float) -> torch.Tensor:
    """(1 - m) (-log s(b d)) + m exp(-b d) with m = s(b d / tau).

    Source: arXiv:2406.08414 eq. 5, tau 0.05.
    """
    x_P = beta * pairs.differences
    mix_P = (x_P / DISCOPOP_TAU).sigmoid()
    return (1 - mix_P) * -functional.logsigmoid(x_P) + mix_P * (-x_P).exp()


def _mean_differences(pairs: Pairs) -> torch.Tensor:
    """d, of log-ratios that are means over the tokens of an answer."""
    chosen_P = pairs.chosen_ratios / pairs.chosen_tokens_P
    return chosen_P - pairs.rejected_ratios / pairs.rejected_tokens_P


LOSSES: Mapping[str, Callable[..., torch.Tensor]] = {
    loss.__name__: loss
    for loss in (
        sigmoid,
        hinge,
        ipo,
        robust,
        sigmoid_norm,
        exo_pair,
        nca_pair,
        bco_pair,
        sppo_hard,
        aot,
        aot_unpaired,
        apo_zero,
        apo_down,
        discopop,
    )
}
"""By name; each takes pairs, beta and the label smoothing, which some do not read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankingObjective(SectionObjective):
    """Plackett and Luce's likelihood of each ranking, by the rewards of its answers.

    With rewards s = b log(p / p_ref), the loss of a ranking is the sum over its answers k of
    log(exp(s_k) + sum of exp(s_j) over the answers j that are worse than k) - s_k: answers that are
    equally good are not compared with each other. That of a step is the mean over its rankings, and
    cross-entropy of the best answers. For two answers it is that of DPO (arXiv:2305.18290, appendix
    A.3), for one good one and several bad ones that of S-DPO (arXiv:2406.09215).
    """

    section: Dpo

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: The scores of all rows of the step.

        Raises:
            DataError: No answer of a ranking is better than another.
        """
        sums, sft_weight = self.sums(scores), self.section.sft_weight
        rewards_A = self.section.beta * sums.log_ratios
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
        if sft_weight:
            nll = -sums.policy_A[first].sum() / sums.tokens_A[first].sum()
            loss = loss + sft_weight * nll
            metrics["nll_loss"] = nll
        return StepLoss(
            value=sums.own_part(loss),
            metrics={name: value.detach() for name, value in metrics.items()},
        )
