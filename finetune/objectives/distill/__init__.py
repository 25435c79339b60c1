"""Distillation: answers with a teacher's distribution at each token."""

from types import MappingProxyType
from typing import Literal

from pydantic import Field

from finetune.recipe.extensions import Objective, ObjectiveSection, chosen


class Distill(ObjectiveSection):
    """Answers with a teacher's likeliest tokens at each token."""

    formats = ("distilled",)
    loss_at = "finetune.objectives.distill.loss:DistillObjective"
    has_teacher = True
    of_losses = MappingProxyType({"temperature": {"kl_top": 1.0}})

    method: Literal["distill"] = chosen("distill")
    loss: Literal["kl", "kl_top"] = Field(
        default="kl",
        description="KL divergence over the given tokens and all others together, or over the given"
        " tokens alone.",
    )
    sft_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the mean cross-entropy of all answers, which is added.",
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="What the loss `kl_top` divides log-probabilities of teacher and model by"
        " before it compares them. Null takes 1.0.",
        examples=[2.0],
    )

    def weight(self, *, num_groups: int, num_rows: int, num_label_tokens: int) -> int:
        """Return what held-out rows count for: that which the loss is a mean over."""
        return num_label_tokens


EXTENSION = Objective(
    settings=Distill,
    summary="learns a teacher's distribution at each token of an answer",
    words={"kd_temperature": "temperature"},
)
