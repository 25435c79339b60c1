"""Settings that several objectives have, and what those of pairs have in common."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from finetune.recipe.extensions import ObjectiveSection

if TYPE_CHECKING:
    import torch

    from finetune.objectives._pairs import PairLoss, Pairs

Beta = Annotated[float, Field(gt=0, description="Scale of the rewards.")]
Reference = Annotated[
    Literal["base", "precomputed"],
    Field(
        description="What answers are compared with: `base`, the model without its adapter, in the"
        " same visits; `precomputed`, log-probabilities known before step 1."
    ),
]
Smoothing = Annotated[
    float,
    Field(
        ge=0,
        lt=0.5,
        description="Part of the pairs that may be labelled the wrong way round.",
        examples=[0.1],
    ),
]
SftWeight = Annotated[
    float,
    Field(ge=0, description="Weight of the chosen answers' mean cross-entropy, which is added."),
]


class Paired(ObjectiveSection):
    """An objective that compares the chosen with the rejected answer of each pair."""

    formats = ("preference",)
    loss_at = "finetune.objectives._pairs:PairObjective"

    beta: float

    @property
    def is_averaged(self) -> bool:
        """Whether answers are compared by means over their tokens."""
        return True

    def loss_of(self) -> "PairLoss":
        """Return the loss of each pair."""
        raise NotImplementedError(self.method)

    def more_metrics(self, pairs: "Pairs") -> "Mapping[str, torch.Tensor]":
        """Return what it reports in addition."""
        return {}
