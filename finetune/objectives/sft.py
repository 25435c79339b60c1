"""To repeat the rows, by the cross-entropy of their tokens, which the engine computes itself."""

from typing import Literal

from finetune.recipe.extensions import Objective, ObjectiveSection, chosen


class Sft(ObjectiveSection):
    """To repeat the rows."""

    formats = ("messages", "alpaca", "sharegpt", "prompt_completion", "text")
    is_cross_entropy = True

    method: Literal["sft"] = chosen("sft")


EXTENSION = Objective(settings=Sft, summary="repeats the rows (cross-entropy)")
