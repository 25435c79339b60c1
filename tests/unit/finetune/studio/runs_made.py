"""Runs of made-up figures in folders."""

from pathlib import Path
from typing import Any

from finetune.recipe.recipe import Recipe
from finetune.run.run_dir import RunDir
from tests.builders import recipe_values
from tests.unit.finetune.report.made_up import write_run

__all__ = ["begun", "write_run"]


def begun(folder: Path, **changes: Any) -> Path:
    """Begin a run in a folder, without a step."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.model_validate(recipe_values(**changes))
    RunDir(folder).start(recipe, experts_implementation=None)
    return folder
