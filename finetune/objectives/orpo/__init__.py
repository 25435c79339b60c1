"""Odds ratio preference optimisation: the chosen answers repeated, and their odds raised."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from finetune.objectives._settings import Paired
from finetune.recipe.extensions import Objective, chosen

if TYPE_CHECKING:
    import torch

    from finetune.objectives._pairs import PairLoss, Pairs


class Orpo(Paired):
    """Pairs of answers: the chosen ones are repeated, and compared by their odds."""

    method: Literal["orpo"] = chosen("orpo")
    beta: Annotated[float, Field(gt=0, description="Weight of the odds ratio.")] = 0.1

    @property
    def nll_weight(self) -> float:
        """Weight of the cross-entropy of the best answers' tokens in the loss."""
        return 1.0

    def loss_of(self) -> "PairLoss":
        """Return the loss of each pair."""
        from finetune.objectives.orpo.loss import orpo

        return partial(orpo, beta=self.beta)

    def more_metrics(self, pairs: "Pairs") -> "Mapping[str, torch.Tensor]":
        """Return the odds."""
        from finetune.objectives.orpo.loss import orpo_metrics

        return orpo_metrics(pairs)


EXTENSION = Objective(
    settings=Orpo,
    summary="repeats one answer of a pair, and prefers it by its odds",
    words={"orpo_alpha": "beta"},
)
