"""Contrastive preference optimisation: losses of DPO without a reference, and cross-entropy."""

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune.objectives._settings import Beta, Paired, SftWeight, Smoothing
from finetune.recipe.extensions import Objective, chosen

if TYPE_CHECKING:
    from finetune.objectives._pairs import PairLoss


class Cpo(Paired):
    """Pairs of answers, compared without a reference, and the chosen ones repeated."""

    of_losses = MappingProxyType({"label_smoothing": {"sigmoid": 0.0}})

    method: Literal["cpo"] = chosen("cpo")
    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        default="sigmoid", description="Loss of a pair, by TRL's names."
    )
    beta: Beta = 0.1
    label_smoothing: Smoothing | None = Field(
        default=None,
        description="Part of the pairs that may be labelled the wrong way round, with the loss"
        " sigmoid. Null takes 0.0.",
        examples=[0.1],
    )
    sft_weight: SftWeight = 1.0

    @property
    def is_averaged(self) -> bool:
        """Whether answers are compared by means over their tokens."""
        return self.loss == "ipo"

    def loss_of(self) -> "PairLoss":
        """Return the loss of each pair."""
        from finetune.objectives.dpo.loss import LOSSES, ipo_of_means

        # means of tokens are taken beforehand, so that what is reported are means too
        of_pair = ipo_of_means if self.loss == "ipo" else LOSSES[self.loss]
        return partial(of_pair, beta=self.beta, smoothing=self.label_smoothing or 0.0)


EXTENSION = Objective(
    settings=Cpo,
    summary="prefers one answer of a pair, without a reference, and repeats it",
    words={"cpo_alpha": "sft_weight"},
)
