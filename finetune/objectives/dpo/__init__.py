"""Direct preference optimisation and its kin: pairs or rankings, against a reference."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune.objectives._settings import Beta, Paired, Reference, SftWeight, Smoothing
from finetune.recipe.extensions import Contradiction, Objective, StepData, chosen, formats_like

if TYPE_CHECKING:
    from finetune.objectives._pairs import PairLoss
    from offload.engine.objective import Objective as StepObjective

Loss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "plackett_luce",
]
_SMOOTHING = {"sigmoid": 0.0, "robust": 0.0, "exo_pair": 1e-3, "aot": 0.0, "aot_unpaired": 0.0}
"""Loss that reads the label smoothing -> its default."""


class Dpo(Paired):
    """Pairs of answers, or rankings, compared by how much likelier they are than by a reference."""

    of_losses = MappingProxyType({"label_smoothing": _SMOOTHING})

    method: Literal["dpo"] = chosen("dpo")
    loss: Loss = Field(
        default="sigmoid", description="Loss of a pair, by TRL's names, or of a ranking."
    )
    beta: Beta = 0.1
    reference: Reference = "base"
    label_smoothing: Smoothing | None = Field(
        default=None,
        description="Part of the pairs that may be labelled the wrong way round. Null takes 0.0;"
        " exo_pair 0.001.",
        examples=[0.1],
    )
    sft_weight: SftWeight = 0.0

    def contradictions(self) -> Iterable[Contradiction]:
        """Yield a loss that corrects for wrong labels, and none that are wrong."""
        yield (
            self.loss in ("robust", "exo_pair") and not self.label_smoothing,
            "label_smoothing",
            "loss",
            "the loss corrects for pairs labelled the wrong way round, so some must be",
            "`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
        )

    @property
    def read_formats(self) -> tuple[str, ...]:
        """The formats that it reads: rankings too where the loss ranks."""
        is_ranking = self.loss == "plackett_luce"
        return formats_like((*self.formats, "ranking") if is_ranking else self.formats)

    @property
    def is_averaged(self) -> bool:
        """Whether answers are compared by means over their tokens."""
        return False

    def loss_of(self) -> "PairLoss":
        """Return the loss of each pair."""
        from finetune.objectives.dpo.loss import LOSSES

        return partial(LOSSES[self.loss], beta=self.beta, smoothing=self.label_smoothing or 0.0)

    def objective(self, step: StepData) -> "StepObjective":
        """Return the loss of a step's pairs or rankings."""
        from finetune.objectives.dpo.loss import RankingObjective

        if self.loss != "plackett_luce":
            return super().objective(step)
        return RankingObjective(
            section=self, step=replace(step, rows=self.with_reference(step.rows))
        )


EXTENSION = Objective(
    settings=Dpo,
    summary="prefers one answer of a pair, against a reference",
    words={
        "dpo_loss": "loss",
        "dpo_beta": "beta",
        "dpo_label_smoothing": "label_smoothing",
        "rpo_alpha": "sft_weight",
        "dpo_ftx": "sft_weight",
    },
)
