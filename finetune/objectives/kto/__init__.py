"""Kahneman-Tversky optimisation: single answers that are desired or not."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from finetune.errors import DataError
from finetune.objectives._settings import Beta, Reference
from finetune.recipe.extensions import Contradiction, Objective, ObjectiveSection, chosen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.data.step_rows import StepRows


class Kto(ObjectiveSection):
    """Answers that are desired or not, each by itself, against a reference."""

    formats = ("labelled",)
    loss_at = "finetune.objectives.kto.loss:KtoObjective"

    method: Literal["kto"] = chosen("kto")
    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        default="kto",
        description="`kto` measures rewards from the KL divergence to the reference, estimated from"
        " prompts with each other's answers; `apo_zero_unpaired` from 0.",
    )
    beta: Beta = 0.1
    reference: Reference = "base"
    desirable_weight: float = Field(default=1.0, ge=0, description="Weight of desired answers.")
    undesirable_weight: float = Field(default=1.0, ge=0, description="Weight of undesired answers.")

    def contradictions(self) -> Iterable[Contradiction]:
        """Yield weights of nothing, and sums in place of what is scored."""
        yield (
            self.desirable_weight == self.undesirable_weight == 0,
            "desirable_weight",
            "undesirable_weight",
            "each answer's loss is multiplied by one of them, so nothing would be learned",
            "`objective.desirable_weight: 1.0`",
        )
        yield (
            self.scores_mismatched and self.precomputes_reference,
            "reference",
            "loss",
            "the KL divergence reads prompts with each other's answers, which no row has",
            "`objective.reference: base`, or `objective.loss: apo_zero_unpaired`",
        )

    @property
    def without_reference(self) -> str:
        """The setting with which no reference is computed, for hints."""
        first = "`objective.loss: apo_zero_unpaired` with " if self.scores_mismatched else ""
        return first + super().without_reference

    @property
    def scores_mismatched(self) -> bool:
        """Whether each prompt is also scored with the answer of another row."""
        return self.loss == "kto"

    def require_values(self, values: "NDArray[Any]") -> None:
        """Check that some answers are desired and some are not.

        Raises:
            DataError: They are not.
        """
        num, num_desired = len(values), int((values != 0).sum())
        if num_desired in (0, num):
            raise DataError(
                f"the labels of all {num} rows are {'true' if num_desired else 'false'}",
                limit="KTO learns from answers that are desired and others that are not",
                hint="add rows with the other label; desired answers alone are learned by"
                " `objective.method: sft`",
            )

    def counts(
        self, rows: "StepRows", label_lens: Sequence[int], metrics: Mapping[str, float]
    ) -> dict[str, int]:
        """Return how many answers are desired, and how many are not, for their metrics."""
        desired = int(rows.values_R[: rows.num_trained].sum())
        of_kind = {"chosen": desired, "rejected": rows.num_trained - desired}
        return {
            f"{name}/{kind}": num for kind, num in of_kind.items() for name in ("rewards", "logps")
        }


EXTENSION = Objective(
    settings=Kto,
    summary="learns from answers that are desired or not",
    words={
        "kto_desirable_weight": "desirable_weight",
        "kto_chosen_weight": "desirable_weight",
        "kto_undesirable_weight": "undesirable_weight",
        "kto_rejected_weight": "undesirable_weight",
    },
)
