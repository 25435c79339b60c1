"""Runs of made-up figures in folders."""

import json
from pathlib import Path
from typing import Any

from finetune.files.manifest import sealed_json
from finetune.recipe.recipe import Recipe
from finetune.run.run_dir import RunDir
from tests.builders import recipe_values
from tests.unit.finetune.report.made_up import write_run

__all__ = ["begun", "write_answers", "write_run"]


def begun(folder: Path, **changes: Any) -> Path:
    """Begin a run in a folder, without a step."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.model_validate(recipe_values(**changes))
    RunDir(folder).start(recipe, experts_implementation=None)
    return folder


def write_answers(folder: Path, when: str, *got: str) -> None:
    """Write what a model answered to rows, before or after training."""
    rows = [{"prompt": f"p{i}", "wanted": f"w{i}", "got": text} for i, text in enumerate(got)]
    text = json.dumps({"exact_match": 0.5, "prompts": {"": len(got)}, "rows": rows}, indent=1)
    (folder / f"samples_{when}.json").write_text(sealed_json(text))
