"""Simple preference optimisation: pairs by the mean log-probability of their tokens."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune.objectives._settings import Beta, Paired, SftWeight, Smoothing
from finetune.recipe.extensions import Objective, chosen

if TYPE_CHECKING:
    from finetune.objectives._pairs import PairLoss


class Simpo(Paired):
    """Pairs of answers, compared by their mean log-probabilities, with a margin."""

    method: Literal["simpo"] = chosen("simpo")
    beta: Beta = 2.0
    gamma: float = Field(
        default=0.5, ge=0, description="Margin that is asked for between the rewards."
    )
    label_smoothing: Smoothing = 0.0
    sft_weight: SftWeight = 0.0

    def loss_of(self) -> "PairLoss":
        """Return the loss of each pair: -(1 - e) log s(x) - e log s(-x) with x = b (c' - r') - g.

        Of a pair, c' and r' are the mean log-probabilities of the tokens of the chosen and the
        rejected answer, b is beta, g gamma and e the label smoothing. Source: arXiv:2405.14734.
        """
        from finetune.objectives._pairs import smoothed

        return lambda pairs: smoothed(
            self.beta * pairs.differences - self.gamma, self.label_smoothing
        )


EXTENSION = Objective(
    settings=Simpo,
    summary="prefers one answer of a pair, without a reference",
    words={"simpo_gamma": "gamma"},
)
