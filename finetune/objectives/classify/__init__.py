"""Classifiers of texts: the class of each row, by a head of its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from finetune.recipe.extensions import Head, Objective, ObjectiveSection, chosen

if TYPE_CHECKING:
    from finetune.run.run_files import Evaluation


class Classify(ObjectiveSection):
    """Texts with the number of their class."""

    formats = ("classified",)
    loss_at = "finetune.objectives.classify.loss:ClassifyObjective"
    head: ClassVar[Head] = "classes"
    has_classes = True
    card = (
        "A classifier of {num_classes} classes by {base}, trained with Sluice:"
        " {trained}, in peft's format for transformers' sequence classification."
        " The class of a text is read at the end-of-text token that follows it."
    )

    method: Literal["classify"] = chosen("classify")

    def merged(self, means: dict[str, float], parts: "Sequence[Evaluation]") -> dict[str, float]:
        """Return the means with F1 of all rows, by the counts of each class."""
        from finetune.objectives.classify.loss import merged

        return merged(means, [part.metrics for part in parts])


EXTENSION = Objective(settings=Classify, summary="tells classes of texts apart")
