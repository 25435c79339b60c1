import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.run.run_dir import RunDir
from tests.e2e.conftest import RecipeWriter
from tests.e2e.runs import run
from tests.e2e.sweeps import Sections, assert_same_bits, trained_together


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"what follows {n}", "chosen": f"{n + 1}", "rejected": f"{n - 1} or so"}
        for n in range(30)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def alone(run_dir: Path, machine_file: Path) -> Path:
    """Run the recipe that a run has left in its directory, by itself."""
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    folder = run_dir.with_name(run_dir.name + "-alone")
    recipe["output"]["dir"] = str(folder)
    file = run_dir.with_name(run_dir.name + "-alone.yaml")
    file.write_text(yaml.safe_dump(recipe))
    assert run("finetune", file, "--machine", machine_file) == 0
    return folder


TWO: list[Sections] = [
    {"train": {"lr": 0.02}, "output": {"eval_every": 2}, "report": {"samples": 2}},
    {
        "train": {"lr": 0.005, "steps": 4, "seed": 3, "grad_accum_steps": 2},
        "adapter": {"rank": 2, "targets": ["q_proj"], "dropout": 0.0},
        "output": {"eval_every": 2},
    },
]


@pytest.mark.slow
def test_two_runs_of_different_length_rank_and_targets_are_each_what_they_are_alone(
    write_recipe: RecipeWriter, machine_file: Path, tmp_path: Path
) -> None:
    folders, outcomes = trained_together(write_recipe, TWO, machine_file, tmp_path)
    assert [outcome.num_steps for outcome in outcomes] == [6, 4]
    for folder in folders:
        assert_same_bits(folder, alone(folder, machine_file))
    # both were in the same visits: the layers were loaded once for both
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["num_loads"] == 4


@pytest.mark.slow
def test_three_runs_of_different_kinds_are_each_what_they_are_alone(
    write_recipe: RecipeWriter, pairs_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    pairs: dict[str, Any] = {"path": str(pairs_file), "format": "preference", "columns": {}}
    no_experts = {"experts": False}
    runs: list[Sections] = [
        {"adapter": {"dropout": 0.1, "targets": "all-linear", **no_experts}},
        {
            "objective": {"method": "dpo"},
            "data": pairs,
            "train": {"micro_batch_size": 4, "grad_accum_steps": 2},
            "output": {"eval_every": 3},
        },
        {"adapter": {"dora": True, "modules_to_save": ["norms"], **no_experts}},
    ]
    folders, _ = trained_together(write_recipe, runs, machine_file, tmp_path)
    for folder in folders:
        assert_same_bits(folder, alone(folder, machine_file))
    assert RunDir(folders[1]).recipe().objective.method == "dpo"
