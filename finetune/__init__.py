"""Fine-tuning runs: from a recipe to an adapter and a report.

    from finetune import load_recipe, merge

Names that need pydantic or torch are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from finetune.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FinetuneError,
    MergeError,
    ModelError,
    RankError,
)

if TYPE_CHECKING:
    from finetune.export.merge import Merged, merge
    from finetune.planning.subject import model_facts
    from finetune.recipe.load import load_recipe
    from finetune.recipe.recipe import Recipe

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FinetuneError",
    "MergeError",
    "Merged",
    "ModelError",
    "RankError",
    "Recipe",
    "load_recipe",
    "merge",
    "model_facts",
]

_LAZY = {
    "Merged": "finetune.export.merge",
    "Recipe": "finetune.recipe.recipe",
    "load_recipe": "finetune.recipe.load",
    "merge": "finetune.export.merge",
    "model_facts": "finetune.planning.subject",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY` when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'finetune' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)
