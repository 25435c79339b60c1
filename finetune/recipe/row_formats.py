"""The formats of rows: to be repeated, or with answers to compare, or a class."""

from finetune.recipe.objective_section import ObjectiveSection

SUPERVISED = ("messages", "alpaca", "sharegpt", "prompt_completion", "text")
COMPARED = (
    "preference",
    "ranking",
    "labelled",
    "sampled",
    "distilled",
    "rated",
    "classified",
    "tagged",
)

_OF_METHOD = {
    "sft": SUPERVISED,
    "kto": ("labelled",),
    "grpo": ("sampled",),
    "distill": ("distilled",),
    "reward": ("rated",),
    "classify": ("classified",),
    "classify_tokens": ("tagged",),
}


def formats_of(objective: ObjectiveSection) -> tuple[str, ...]:
    """Return the values of `data.format` that an objective reads; of `auto`, one of these."""
    if objective.is_ranking:
        return ("preference", "ranking")
    return _OF_METHOD.get(objective.method, ("preference",))
