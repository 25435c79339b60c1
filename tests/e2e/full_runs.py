"""Recipes and results of full training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offload.plan.machine.machine import Machine
from tests.e2e.runs import losses, rows_of


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


def assert_trained_alike(one: Path, other: Path, *, base: Path, name: str) -> torch.Tensor:
    """Compare all that runs leave, and return a weight as plain transformers loads it.

    Args:
        one: A run's directory.
        other: That of the run it is compared with.
        base: The model that both began with.
        name: The weight's name; it has changed.
    """
    assert_same_runs(one, other)
    evaluated = [[row.get("eval_loss") for row in rows_of(run_dir)] for run_dir in (one, other)]
    assert evaluated[0] == evaluated[1]
    samples = [(run_dir / "samples_after.json").read_text() for run_dir in (one, other)]
    assert samples[0] == samples[1]
    loaded: Any = AutoModelForCausalLM.from_pretrained(one / "model", output_loading_info=True)
    found, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weight: torch.Tensor = found.get_parameter(name)
    assert torch.equal(weight, weights(one)[name])
    before: Any = AutoModelForCausalLM.from_pretrained(base, dtype=found.dtype)
    assert not torch.equal(weight, before.get_parameter(name))
    return weight


def reported(run_dir: Path) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return memory by name: what was measured, and what was planned on the device and in RAM."""
    measured, predicted = (
        json.loads((run_dir / f"{name}.json").read_text()) for name in ("measured", "predicted")
    )
    terms = {term["name"]: term["num_bytes"] for term in measured["memory"]}
    planned = predicted["calibrated"]["predicted"]
    return terms, planned["device_memory"], planned["host_memory"]


def computing_in(dtype: str, machine_file: Path, folder: Path) -> Path:
    """Return the file of a machine of this type; a run measures its own step."""
    here: Any = Machine.from_json(machine_file.read_text())
    (folder / "here.json").write_text(replace(here, dtype=dtype).to_json())
    return folder / "here.json"
