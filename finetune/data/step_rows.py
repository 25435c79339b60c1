"""What the rows of a step are to each other, and what is known of them on all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from finetune.errors import DataError
from finetune.recipe.extensions import ObjectiveSection, StepData
from offload.engine.objective import Reference, Scores


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRows:
    """The rows of a step, in the order of its micro-batches; the only scored ones come last."""

    # Number of the group within the step, int64, from 0: a pair of answers, a ranking, or all
    # answers that were sampled for one prompt. Rows of one group need not be next to each other. An
    # unpaired row is a group of its own; a row that is only scored has the number of the row that
    # it was made for.
    groups_R: torch.Tensor
    # What is known of each row, float64: of a pair 1 for the chosen answer, or 1 more than the
    # pair's margin, and 0 for the rejected one; of an unpaired row 1 if it is desired, else 0; of a
    # ranking the higher the better; of a sampled answer its reward; of a text that is classified
    # the number of its class.
    values_R: torch.Tensor
    num_trained: int  # rows that are trained on; the others are only scored
    # Sum of the reference's log-probabilities over a row's label tokens, where it is known
    # beforehand, float64; None where the reference is computed.
    reference_R: torch.Tensor | None = None
    # Log-probability with which the sampler drew each label token of the step, in the order of
    # `Scores.policy_N`, float32; None where it is not known.
    sampler_N: torch.Tensor | None = None
    # A teacher's likeliest tokens at each label token, in the same order, int64, the likeliest
    # first; -1 where there are fewer than K. None where rows have no teacher.
    top_ids_NK: torch.Tensor | None = None
    top_logps_NK: torch.Tensor | None = None  # their log-probabilities by the teacher, in nats
    # Number of the class at each label token, in the same order, int64, where words have classes;
    # None elsewhere.
    classes_N: torch.Tensor | None = None

    @property
    def reference(self) -> Reference | None:
        """What a loss with a reference compares with: the base, unless that is known beforehand."""
        return Reference() if self.reference_R is None else None


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
    """The rows of a step: this rank's own first, then those of the others, as constants."""

    # Sum of the log-probabilities of a row's label tokens; own ones have a graph.
    policy_A: torch.Tensor
    # The sum of the log-probabilities by the reference; zeros without one.
    reference_A: torch.Tensor
    tokens_A: torch.Tensor  # number of its label tokens
    groups_A: torch.Tensor  # the groups, see `StepRows.groups_R`
    values_A: torch.Tensor  # the values, see `StepRows.values_R`
    is_trained_A: torch.Tensor  # whether it is trained on, and not only scored
    share: float  # one over the number of ranks

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
        scores: The scores of this rank's rows.
        rows: The relations of these rows; numbers of groups are those of the whole step.
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
class SectionObjective:
    """The loss of a step by the section of a recipe."""

    section: ObjectiveSection  # the settings
    step: StepData  # what it may read

    @property
    def reference(self) -> Reference | None:
        """The base, unless its log-probabilities are known or not needed."""
        return Reference() if self.section.computes_reference else None

    def sums(self, scores: Scores) -> RowSums:
        """Return the rows of all ranks, with the reference's sums if it is compared with one."""
        compares = self.section.computes_reference or self.section.precomputes_reference
        return row_sums(scores, self.step.rows, self.step.exchange, has_reference=compares)
