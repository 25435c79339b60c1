"""Classifiers of words: the class of each, read at its first token."""

from typing import Literal

from finetune.objectives.classify import Classify
from finetune.recipe.extensions import Objective, chosen


class ClassifyTokens(Classify):
    """Words with the number of the class of each."""

    formats = ("tagged",)
    head = "token_classes"
    classifies_tokens = True
    card = (
        "A classifier of words in {num_classes} classes by {base}, trained with"
        " Sluice: {trained}, in peft's format for transformers' token"
        " classification. The class of a word is read at its first token."
    )

    method: Literal["classify_tokens"] = chosen("classify_tokens")  # type: ignore[assignment]

    def weight(self, *, num_groups: int, num_rows: int, num_label_tokens: int) -> int:
        """Return what held-out rows count for: that which the loss is a mean over."""
        return num_label_tokens


EXTENSION = Objective(settings=ClassifyTokens, summary="tells classes of words apart")
