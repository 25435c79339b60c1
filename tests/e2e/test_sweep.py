"""Sweeps from a recipe: runs that share a stream."""

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.run.run_dir import RunDir
from finetune.sweep import sweep
from finetune.sweep.together import train_together
from finetune.training.run import Outcome, Run
from offload.errors import DoesNotFitError
from tests.e2e.conftest import RecipeWriter
from tests.e2e.forked import Forked
from tests.e2e.runs import rows_of, run
from tests.e2e.sweeps import Sections, assert_same_bits, learned, states, trained_together

GRID = ("train.lr=0.02,0.005", "adapter.rank=2,4")
FIRST, LAST = "lr-0.02_rank-2", "lr-0.005_rank-4"


@pytest.fixture
def recipe(write_recipe: RecipeWriter, tmp_path: Path) -> Path:
    output = {"eval_every": 2, "dir": str(tmp_path / "sweep")}
    return write_recipe(output=output, train={"steps": 4})


@pytest.mark.slow
def test_a_grid_is_trained_ranked_and_its_best_recipe_written(
    recipe: Path, machine_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("sweep", recipe, *GRID, "--machine", machine_file) == 0
    shown, folder = capsys.readouterr().out, tmp_path / "sweep"
    found = states(folder)
    assert len(found) == 4
    assert all(one["status"] == "finished" for one in found.values())
    last = {name: rows_of(folder / name)[-1]["eval_loss"] for name in found}
    assert {name: one["eval_loss"] for name, one in found.items()} == last
    order = sorted(last, key=lambda name: last[name])
    table = shown[shown.index("Runs by their loss") :]
    assert sorted(order, key=table.index) == order
    best = yaml.safe_load((folder / "best.yaml").read_text())
    expected = yaml.safe_load((folder / order[0] / "recipe.yaml").read_text())
    assert best["output"].pop("name") == "sweep-best"
    assert best["train"] == expected["train"]
    assert best["adapter"] == expected["adapter"]
    assert f"{FIRST}: step 4/4" in shown
    page = (folder / "sweep.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in found)
    assert (folder / FIRST / "report.html").exists()
    # the same again is refused by name, and begins again if asked to
    assert run("sweep", recipe, *GRID, "--machine", machine_file) == 1
    assert "holds a sweep already" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_that_do_not_fit_together_train_in_halves(
    recipe: Path,
    machine_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial of the longest batch, or the traced memory, refuses three or more."""
    sizes = []

    def small(runs: Sequence[Run], **how: Any) -> list[Outcome]:
        sizes.append(len(runs))
        if len(runs) > 2:
            raise DoesNotFitError("they take 9 GiB", limit="there are 8", hint="fewer")
        return train_together(runs, **how)

    monkeypatch.setattr(sweep, "train_together", small)
    lrs = "train.lr=0.02,0.01,0.005"
    assert run("sweep", recipe, lrs, "train.steps=2", "--machine", machine_file) == 0
    assert sizes == [3, 2, 1]
    assert "3 runs do not fit together (they take 9 GiB): 2 at a time" in capsys.readouterr().out
    found = states(tmp_path / "sweep")
    assert [one["status"] for one in found.values()] == ["finished"] * 3


@pytest.mark.slow
def test_runs_that_do_not_fit_together_by_the_plan_train_in_its_waves(
    recipe: Path, machine_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_graphs = ("offload.kept_graphs=0", "offload.attention_outputs=none", "offload.stash=device")
    fixed = (*no_graphs, "offload.num_slots=2", "train.steps=2", "--machine", machine_file)
    words = (recipe, "train.lr=0.02,0.01,0.005", *fixed)
    assert run("sweep", *words) == 0
    folder, whole = tmp_path / "sweep", tmp_path / "whole"
    assert "waves" not in capsys.readouterr().out
    folder.rename(whole)
    predicted = json.loads((whole / "lr-0.02" / "predicted.json").read_text())
    peak_bytes = predicted["before measuring"]["predicted"]["peak_vram_bytes"]
    budget_gib = (peak_bytes - 1) / 2**30
    assert run("sweep", *words, f"offload.vram_budget={budget_gib!r}") == 0
    assert "By the plan, 3 runs train in waves of 2 and 1" in capsys.readouterr().out
    for name in states(folder):
        assert_same_bits(folder / name, whole / name)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_bits(
    recipe: Path, machine_file: Path, tmp_path: Path, forked: Forked
) -> None:
    settings = ("output.checkpoint_every=1", "output.keep_checkpoints=8", "train.steps=8")
    words = (recipe, "train.lr=0.02,0.005", *settings, "--machine", machine_file)
    assert run("sweep", *words) == 0
    folder, whole = tmp_path / "sweep", tmp_path / "whole"
    folder.rename(whole)
    process = forked.start("sweep", *words)
    process.wait_for(lambda: (folder / "lr-0.005" / "checkpoints" / "step-0000003").exists())
    process.end(signal.SIGKILL)
    assert not (folder / "lr-0.02" / "adapter").exists()
    # one of them has lost its newest checkpoints, and catches up with the other
    for step in (3, 4, 5, 6, 7):
        shutil.rmtree(folder / "lr-0.02" / "checkpoints" / f"step-000000{step}", ignore_errors=True)
    assert run("sweep", folder, "--resume", "--machine", machine_file) == 0
    for name in states(folder):
        assert_same_bits(folder / name, whole / name)


@pytest.mark.slow
def test_an_interrupted_sweep_saves_all_its_runs(
    recipe: Path, machine_file: Path, tmp_path: Path, forked: Forked
) -> None:
    words = (recipe, *GRID, "train.steps=400", "--machine", machine_file)
    process = forked.start("sweep", *words)
    folder = tmp_path / "sweep"
    process.wait_for(lambda: (folder / LAST / "checkpoints" / "step-0000002").exists())
    assert process.end(signal.SIGINT) == 130
    assert "--resume" in process.shown
    for name, state in states(folder).items():
        (newest,) = sorted((folder / name / "checkpoints").iterdir())[-1:]
        assert int(newest.name[-7:]) == len(rows_of(folder / name)) == state["steps"]
        assert state["status"] == "waiting"


@pytest.mark.slow
def test_a_run_that_diverges_leaves_alone(
    recipe: Path, machine_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ("train.optimizer=sgd", "train.max_grad_norm=null", "adapter.alpha=8,1e12")
    notify = f"report.notify=tee -a {tmp_path / 'heard.jsonl'}"
    assert run("sweep", recipe, *quiet, notify, "--machine", machine_file) == 1
    heard = map(json.loads, (tmp_path / "heard.jsonl").read_text().splitlines())
    assert [(one["run"], one["event"]) for one in heard] == [
        ("tiny-alpha-1e12", "divergence"),
        ("tiny-alpha-8", "end"),
    ]
    folder = tmp_path / "sweep"
    found = states(folder)
    assert [one["status"] for one in found.values()] == ["finished", "failed"]
    assert "must be finite" in str(found["alpha-1e12"]["why"])
    assert "alpha-1e12 has left" in capsys.readouterr().out
    assert not (folder / "alpha-1e12" / "adapter").exists()
    assert len(learned(folder / "alpha-8")) == 4


@pytest.mark.slow
def test_a_run_that_is_worse_than_the_best_stops_and_is_saved(
    recipe: Path, machine_file: Path, tmp_path: Path
) -> None:
    rule = ("stop.worse_than_best_by=0.0", "stop.after_steps=2")
    words = (recipe, "train.lr=0.02,1e-6", *rule, "--machine", machine_file)
    assert run("sweep", *words) == 0
    folder = tmp_path / "sweep"
    found = states(folder)
    assert found["lr-0.02"]["status"] == "finished"
    assert found["lr-1e-6"]["status"] == "stopped"
    assert found["lr-1e-6"]["steps"] == 2
    assert (folder / "lr-1e-6" / "checkpoints" / "step-0000002").exists()
    before = learned(folder / "lr-1e-6")
    assert run("sweep", folder, "--resume", "--machine", machine_file) == 0
    assert learned(folder / "lr-1e-6") == before
    assert states(folder)["lr-1e-6"]["status"] == "stopped"


@pytest.mark.thorough
def test_recipes_that_share_their_base_train_together(
    write_recipe: RecipeWriter,
    machine_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    for name, lr in (("one", 0.02), ("two", 0.01)):
        output = {"name": name, "dir": str(tmp_path / name)}
        file = write_recipe(output=output, train={"lr": lr, "steps": 2})
        files.append(file.rename(file.with_name(f"{name}.yaml")))
    assert run("finetune", *files, "--machine", machine_file) == 0
    assert (tmp_path / "one" / "adapter").exists()
    assert (tmp_path / "two" / "adapter").exists()
    assert (tmp_path / "runs" / "one-and-1-more" / "sweep.json").exists()
    capsys.readouterr()
    other = yaml.safe_load(files[1].read_text())
    other["offload"]["num_slots"] = 3
    files[1].write_text(yaml.safe_dump(other))
    assert run("finetune", *files, "--machine", machine_file, "--overwrite") == 1
    assert "offload.num_slots is 2 in one and 3 in two" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- together


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
