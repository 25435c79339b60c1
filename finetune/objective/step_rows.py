"""What the rows of a step are to each other."""

from dataclasses import dataclass

import torch

from offload.engine.objective import Reference


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRows:
    """The rows of a step, in the order of its micro-batches; those that are only scored come last.

    Attributes:
        groups_R: Number of the group within the step, int64, from 0: a pair of answers, a ranking,
            or all answers that were sampled for one prompt. Rows of one group need not be next to
            each other. An unpaired row is a group of its own; a row that is only scored has the
            number of the row that it was made for.
        values_R: What is known of each row, float64: of a pair 1 for the chosen answer, or 1 more
            than the pair's margin, and 0 for the rejected one; of an unpaired row 1 if it is
            desired, else 0; of a ranking the higher the better; of a sampled answer its reward; of
            a text that is classified the number of its class.
        num_trained: Rows that are trained on; the others are only scored.
        reference_R: Sum of the reference's log-probabilities over a row's label tokens, where it is
            known beforehand, float64; None where the reference is computed.
        sampler_N: Log-probability with which the sampler drew each label token of the step, in the
            order of `Scores.policy_N`, float32; None where it is not known.
        top_ids_NK: A teacher's likeliest tokens at each label token, in the same order, int64, the
            likeliest first; -1 where there are fewer than K. None where rows have no teacher.
        top_logps_NK: Their log-probabilities by the teacher, in nats.
        classes_N: Number of the class at each label token, in the same order, int64, where words
            have classes; None elsewhere.
    """

    groups_R: torch.Tensor
    values_R: torch.Tensor
    num_trained: int
    reference_R: torch.Tensor | None = None
    sampler_N: torch.Tensor | None = None
    top_ids_NK: torch.Tensor | None = None
    top_logps_NK: torch.Tensor | None = None
    classes_N: torch.Tensor | None = None

    @property
    def reference(self) -> Reference | None:
        """What a loss with a reference compares with: the base, unless that is known beforehand."""
        return Reference() if self.reference_R is None else None
