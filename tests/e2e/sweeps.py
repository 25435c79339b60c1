"""Runs that share a stream, and two runs' directories, compared for what a run has learned."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import Recipe
from finetune.report.screen import Screen
from finetune.sweep.together import train_together
from finetune.training.ranks import Ranks
from finetune.training.run import Outcome, opened
from tests.e2e.conftest import RecipeWriter

Sections = dict[str, dict[str, object]]

# of metrics.jsonl; the others are times and loads, which runs that share a step share
LEARNED = ("step", "loss", "grad_norm", "lr", "num_tokens", "num_label_tokens")


def trained_together(
    write: RecipeWriter, runs: Sequence[Sections], machine_file: Path, tmp_path: Path
) -> tuple[list[Path], list[Outcome]]:
    """Train runs over one stream; return their directories, and how they ended."""
    screen = Screen(Console(quiet=True), is_verbose=False)
    recipes, folders = [], []
    for number, sections in enumerate(runs):
        folders.append(tmp_path / f"shared-{number}")
        output = {**sections.get("output", {}), "dir": str(folders[-1])}
        recipes.append(load_recipe(str(write(**{**sections, "output": output})), []))
    return folders, opened_and_trained(recipes, machine_file, screen)


def opened_and_trained(
    recipes: Sequence[Recipe], machine_file: Path, screen: Screen
) -> list[Outcome]:
    """Train new runs over one stream, none of which stops early."""
    with ExitStack() as held:
        runs = [
            held.enter_context(
                opened(
                    recipe,
                    ranks=Ranks(),
                    screen=screen,
                    is_resume=False,
                    may_overwrite=False,
                    adapter=f"run_{number}",
                )
            )
            for number, recipe in enumerate(recipes, 1)
        ]
        return train_together(runs, screen=screen, machine_file=machine_file, judge=lambda *_: {})


def states(folder: Path) -> dict[str, dict[str, object]]:
    """Return what a sweep has written of its runs, by name."""
    content = json.loads((folder / "sweep.json").read_text())
    return {one["name"]: one for one in content["runs"]}


def learned(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in row.items()
            if name in LEARNED or name.startswith(("eval_", "rewards/", "logps/"))
        }
        for row in rows
    ]


def assert_same_bits(run_dir: Path, alone: Path) -> None:
    """Compare losses, checkpoints and adapters of a run that shared its steps with one alone."""
    assert learned(run_dir) == learned(alone)
    assert len(learned(alone)[0]) >= len(LEARNED)
    names = sorted(path.name for path in (alone / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names
    for name in names:
        mine, other = (folder / "checkpoints" / name for folder in (run_dir, alone))
        assert_same_tensors(mine / "trained.safetensors", other / "trained.safetensors")
        assert_same_states(
            *(torch.load(folder / "optimizer.pt", weights_only=True) for folder in (mine, other))
        )
        states = [json.loads((folder / "state.json").read_text()) for folder in (mine, other)]
        assert states[0] == states[1]
    weights = "adapter_model.safetensors"
    assert_same_tensors(run_dir / "adapter" / weights, alone / "adapter" / weights)
    config = "adapter_config.json"
    assert (run_dir / "adapter" / config).read_text() == (alone / "adapter" / config).read_text()


def assert_same_tensors(mine: Path, other: Path) -> None:
    found, expected = load_file(mine), load_file(other)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_same_states(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same_states(found[key], value)
    elif isinstance(expected, list):
        assert isinstance(found, list)
        for mine, other in zip(found, expected, strict=True):
            assert_same_states(mine, other)
    else:
        assert found == expected
