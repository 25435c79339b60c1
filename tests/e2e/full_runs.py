"""Recipes and results of full training."""

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.e2e.runs import losses


def full_recipe(
    write_recipe: Any, *, dtype: str = "float32", what: object = "all", **train: object
) -> Path:
    recipe: Path = write_recipe(
        model={"dtype": dtype},
        train={"what": what, "lr": 0.003, "max_grad_norm": 0.5, **train},
        output={"eval_every": 3},
    )
    content = yaml.safe_load(recipe.read_text())
    del content["adapter"]
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in (run_dir / "model").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def checkpoint(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    file = run_dir / "checkpoints" / f"step-{step:07d}" / "trained.safetensors"
    found: dict[str, torch.Tensor] = load_file(file)
    return found


def assert_same_runs(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
