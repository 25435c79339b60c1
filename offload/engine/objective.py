"""What a step's loss is computed from: log-probabilities of label tokens, and a reference's.

A loss may ask for more at each label: the log-probabilities of tokens that it names, as a teacher's
distribution is known at a few. Or for something else: what a sequence classifier's head returns, as
the reward of a row.

A loss of preferences reads whole rows, and some read all rows of a step at once. So a step with an
objective computes the log-probabilities of all its label tokens first, takes the loss and its
gradient by each of them over the whole step, and passes that gradient on, micro-batch by
micro-batch. However a step is cut into micro-batches, its loss is the same.

Shapes: N label tokens of the step, R rows of the step, K tokens that a loss names at each label.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Which model the policy is compared with; it costs a forward in the same visits."""

    # Name of the adapter that it computes with; None for the base without adapters.
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """The log-probabilities of a step's label tokens.

    Rows are counted through the step: those of the first micro-batch, then those of the second, and
    after all that are trained on those that are only scored.
    """

    # Log-probability of each label token, in nats, in at least float32; for an `OutputObjective`
    # the head's output there, or all of them, (N, C). The gradient of the loss is taken by those of
    # rows that are trained on; the others are constants.
    policy_N: torch.Tensor
    # The log-probability by the reference, without a graph; None if there is none.
    reference_N: torch.Tensor | None
    rows_N: torch.Tensor  # the row of each, int64
    num_rows: int  # R
    # Log-probability of each token that a `TopObjective` names, by the policy; 0 where it names
    # none. None for other objectives.
    top_NK: torch.Tensor | None = None
    others_N: torch.Tensor | None = None  # the log-probability of all other tokens together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLoss:
    """The loss of a step."""

    value: torch.Tensor  # a scalar with a graph to `Scores.policy_N`, `top_NK` or `others_N`
    metrics: Mapping[str, torch.Tensor]  # scalars without a graph, by name


class Objective(Protocol):
    """The loss of one step; what its rows are to each other is the objective's own.

    Its log-probabilities, and a reference's, are of logits over its attribute `logits_temperature`,
    where it has one.
    """

    @property
    def reference(self) -> Reference | None:
        """What to compare with; None if the loss has no reference."""

    def loss(self, scores: Scores) -> StepLoss:
        """Return the loss of a step.

        Args:
            scores: Of all its rows.
        """


@runtime_checkable
class TopObjective(Objective, Protocol):
    """A loss that also reads, at each label, the log-probabilities of tokens that it names."""

    @property
    def top_ids(self) -> torch.Tensor:
        """Tokens (N, K), int64, in the order of `Scores.policy_N`; -1 where there are fewer than K.

        Those of a label differ from each other, and the first is none of the -1.
        """


@runtime_checkable
class OutputObjective(Objective, Protocol):
    """A loss that reads the head's outputs of a sequence classifier, no log-probabilities.

    It reads them at each token that has a label, by that token and those before it: a label is of
    its own token here, and does not say which token comes next. Of a reward model and of a
    classifier it is the last token of each row.
    """

    @property
    def output_index(self) -> int | None:
        """Which of the head's outputs it reads, from 0; None reads all."""
