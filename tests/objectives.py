"""The objectives that there are, and their losses."""

from typing import Any, get_args

from finetune.recipe.extensions import OBJECTIVES

METHODS = tuple(OBJECTIVES)


def losses_of(method: str) -> tuple[Any, ...]:
    """Return the losses of a method, the default first; None for its only one."""
    field = OBJECTIVES[method].settings.model_fields.get("loss")
    return (None,) if field is None else get_args(field.annotation)
