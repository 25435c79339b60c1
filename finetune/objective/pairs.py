"""Losses of pairs of answers: what they read of a pair, and what all of them report.

P pairs of the step, those of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from finetune.errors import DataError
from finetune.objective.step_rows import StepRows
from offload.engine.objective import Reference, Scores, StepLoss

# ---------------------------------------------------------------------------------------------
# What is known of each row of a step, with the rows of all ranks.
#
# A loss of preferences compares rows, or reads all of them at once, so each rank computes the loss
# of the whole step: from its own rows with a graph, and from those of the others as constants. The
# gradients by its own rows are then those of the whole step, and the parts of the loss that the
# ranks return add up to it.
#
# All of it is computed on the CPU in float64: a step has few rows, and sums there have one order,
# so the same rows give the same bits. N label tokens and R rows of this rank, A rows of all ranks.

Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Hands a table to the other ranks and returns theirs; tables differ in their number of rows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSums:
    """The rows of a step: this rank's own first, then those of the others, as constants.

    Attributes:
        policy_A: Sum of the log-probabilities of a row's label tokens; own ones have a graph.
        reference_A: The same by the reference; zeros if there is none.
        tokens_A: Number of its label tokens.
        groups_A: As `StepRows.groups_R`.
        values_A: As `StepRows.values_R`.
        is_trained_A: Whether it is trained on, and not only scored.
        share: One over the number of ranks.
    """

    policy_A: torch.Tensor
    reference_A: torch.Tensor
    tokens_A: torch.Tensor
    groups_A: torch.Tensor
    values_A: torch.Tensor
    is_trained_A: torch.Tensor
    share: float

    @property
    def log_ratios(self) -> torch.Tensor:
        """The log of how much likelier a row is than by the reference."""
        return self.policy_A - self.reference_A

    def own_part(self, loss: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the loss of a whole step, with all of its gradient."""
        return loss - (1 - self.share) * loss.detach()


def row_sums(
    scores: Scores, rows: StepRows, exchange: Exchange | None, *, has_reference: bool = False
) -> RowSums:
    """Sum up the log-probabilities of each row, and get those of the other ranks' rows.

    Args:
        scores: Of this rank's rows.
        rows: What they are to each other; numbers of groups are those of the whole step.
        exchange: Called once; None if there are no other ranks.
        has_reference: Whether the loss compares with a reference, whose scores are read then.

    Raises:
        DataError: A value of a row is not a number.
    """
    if not bool(rows.values_R.isfinite().all()):
        at = int((~rows.values_R.isfinite()).nonzero()[0])
        raise DataError(
            f"the value of row {at} of a step is {rows.values_R[at].item()}",
            limit="labels, ranks and rewards are finite numbers",
            hint="correct the row, or leave it out",
        )
    assert len(rows.groups_R) == len(rows.values_R) == scores.num_rows
    rows_N = scores.rows_N.cpu()
    policy_R = summed(scores.policy_N, rows_N, scores.num_rows)
    reference_R = torch.zeros_like(policy_R)
    if has_reference and rows.reference_R is not None:
        reference_R = rows.reference_R.cpu().double()
    elif has_reference:
        assert scores.reference_N is not None, "computed, as the objective asks"
        reference_R = summed(scores.reference_N, rows_N, scores.num_rows)
    own_RC = torch.stack(
        (
            reference_R.detach(),
            summed(torch.ones(len(rows_N)), rows_N, scores.num_rows),
            rows.groups_R.cpu().double(),
            rows.values_R.cpu().double(),
            (torch.arange(scores.num_rows) < rows.num_trained).double(),
        ),
        dim=1,
    )
    others = exchange(torch.cat((policy_R.detach()[:, None], own_RC), dim=1)) if exchange else ()
    policy_A = torch.cat((policy_R, *(table[:, 0] for table in others)))
    all_AC = torch.cat((own_RC, *(table[:, 1:] for table in others)))
    reference_A, tokens_A, groups_A, values_A, is_trained_A = all_AC.unbind(1)
    return RowSums(
        policy_A=policy_A,
        reference_A=reference_A,
        tokens_A=tokens_A,
        groups_A=groups_A.long(),
        values_A=values_A,
        is_trained_A=is_trained_A.bool(),
        share=1 / (1 + len(others)),
    )


def summed(values_N: torch.Tensor, rows_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum values by row, in float64 on the CPU."""
    zeros_R = torch.zeros(num_rows, dtype=torch.float64)
    return zeros_R.index_add(0, rows_N, values_N.cpu().double())


def ordered(sums: RowSums) -> list[torch.Tensor]:
    """Return the rows of each group that is trained on, those with the highest value first."""
    trained = sums.is_trained_A.nonzero()[:, 0]
    by_value = trained[sums.values_A[trained].argsort(descending=True, stable=True)]
    by_group = by_value[sums.groups_A[by_value].argsort(stable=True)]
    _, sizes = sums.groups_A[by_group].unique_consecutive(return_counts=True)
    return list(by_group.split(sizes.tolist()))


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs:
    """The pairs of a step.

    Attributes:
        chosen_P: Log-probability of each chosen answer, of all its tokens or their mean.
        rejected_P: The same of each rejected answer.
        chosen_reference_P: The same of the chosen answer by the reference; zeros without one.
        rejected_reference_P: The same of the rejected answer.
        chosen_tokens_P: Label tokens of each chosen answer.
        rejected_tokens_P: The same of each rejected answer.
    """

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    chosen_reference_P: torch.Tensor
    rejected_reference_P: torch.Tensor
    chosen_tokens_P: torch.Tensor
    rejected_tokens_P: torch.Tensor

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
PairMetrics = Callable[[Pairs], Mapping[str, torch.Tensor]]


def no_metrics(pairs: Pairs) -> Mapping[str, torch.Tensor]:
    """Report nothing more."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairObjective:
    """The mean of a loss over all pairs of a step, and cross-entropy of the chosen answers.

    Attributes:
        rows: What the step's rows are to each other.
        loss_of: The loss of each pair.
        beta: Scale of the rewards that are reported.
        sft_weight: Weight of the mean cross-entropy of the chosen answers' tokens.
        is_averaged: Whether the log-probability of an answer is the mean over its tokens.
        has_reference: Whether the loss compares with a reference.
        more_metrics: What it reports in addition.
        exchange: Gets the rows of the other ranks.
    """

    rows: StepRows
    loss_of: PairLoss
    beta: float
    sft_weight: float
    is_averaged: bool
    has_reference: bool
    more_metrics: PairMetrics = no_metrics
    exchange: Exchange | None = None

    @property
    def reference(self) -> Reference | None:
        """The base, unless its log-probabilities are known or not needed."""
        return self.rows.reference if self.has_reference else None

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: Of all its rows.

        Raises:
            DataError: Rows of a group are not one chosen and one rejected answer.
        """
        sums = row_sums(scores, self.rows, self.exchange, has_reference=self.has_reference)
        chosen, rejected = paired(sums)
        divisors_A = sums.tokens_A if self.is_averaged else torch.ones_like(sums.tokens_A)
        policy_A, reference_A = sums.policy_A / divisors_A, sums.reference_A / divisors_A
        pairs = Pairs(
            chosen_P=policy_A[chosen],
            rejected_P=policy_A[rejected],
            chosen_reference_P=reference_A[chosen],
            rejected_reference_P=reference_A[rejected],
            chosen_tokens_P=sums.tokens_A[chosen],
            rejected_tokens_P=sums.tokens_A[rejected],
        )
        loss = self.loss_of(pairs).mean()
        metrics = {**_metrics(pairs, self.beta), **self.more_metrics(pairs)}
        if self.sft_weight:
            nll = -sums.policy_A[chosen].sum() / sums.tokens_A[chosen].sum()
            loss = loss + self.sft_weight * nll
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
