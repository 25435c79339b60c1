"""A run whose model and rows are on a hub: its commits in a resume, a rerun and afterwards."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import RecipeWriter, save_model
from tests.e2e.runs import losses, run
from tests.hub import Hub, ask, commit_of, hub

ON_HUB = ("model.path=own/model", "data.path=own/rows")


@pytest.fixture
def served(
    tmp_path: Path, model_dir: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    with hub(tmp_path / "hub") as one:
        shutil.copytree(model_dir, one.folder / "own" / "model")
        rows = one.folder / "datasets" / "own" / "rows" / "train.jsonl"
        rows.parent.mkdir(parents=True)
        shutil.copy(rows_file, rows)
        ask(one, monkeypatch)
        yield one


def move_on(repo: Path) -> None:
    """Leave a repository's commit as its old one, and put a copy of it where it was."""
    repo.rename(repo.with_name(f"{repo.name}@old"))
    shutil.copytree(repo.with_name(f"{repo.name}@old"), repo)
    (repo / "new.json").write_text("{}")


@pytest.mark.slow
def test_a_run_is_of_one_commit_for_good(
    served: Hub, write_recipe: RecipeWriter, machine_file: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    recipe = write_recipe(train={"steps": 2})
    model, rows = served.folder / "own" / "model", served.folder / "datasets" / "own" / "rows"
    commits = commit_of(model), commit_of(rows)
    words = ("finetune", recipe, *ON_HUB, "--machine", machine_file)
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert shown.index("after the plan") < shown.index("Plan for") < shown.index("\nDownloading ")
    run_dir = tmp_path / "run"
    kept = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    assert (kept["model"]["revision"], kept["data"]["revision"]) == commits
    assert (
        json.loads((run_dir / "adapter/adapter_config.json").read_text())["revision"] == commits[0]
    )
    assert f'"own/model", revision="{commits[0]}"' in (run_dir / "adapter/README.md").read_text()

    # the branches move on: a resume and a rerun read what the run began with
    move_on(rows)
    shutil.move(model, model.with_name("model@old"))
    save_model(model)
    (model / "model.safetensors").write_bytes(b"another model")
    assert run(*words, "train.steps=3", "--resume") == 0
    assert len(losses(run_dir)) == 3
    again = tmp_path / "again"
    assert (
        run("finetune", run_dir / "recipe.yaml", f"output.dir={again}", "--machine", machine_file)
        == 0
    )
    assert losses(again)[:2] == losses(run_dir)[:2]

    # ... and so does what reads the base again, on a machine without it
    shutil.rmtree(served.variables["HF_HOME"])
    capsys.readouterr()
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 0
    assert "Downloading own/model: " in capsys.readouterr().err
    assert run("generate", run_dir, "--prompt", "what follows 1", "--max-new-tokens", "2") == 0
    # the adapter is uploaded with a card that loads it from there
    ask(served, monkeypatch, token="writer")
    assert run("push", run_dir, "--repo", "own/adapter") == 0
    there = served.folder / "own" / "adapter"
    assert '(base, "own/adapter")' in (there / "README.md").read_text()
    assert (there / "adapter_config.json").read_text() == (
        (run_dir / "adapter" / "adapter_config.json").read_text() + "\n"
    )
    assert not (there / "manifest.json").exists()
    merged_card = (tmp_path / "merged" / "README.md").read_text()
    assert merged_card.startswith("---\nbase_model: own/model\nlibrary_name: transformers\n")
    assert "\n## The adapter\n\n### " in merged_card
    assert "ADAPTER" not in merged_card

    scored = ("score", run_dir / "recipe.yaml", rows / "train.jsonl", "--adapter", run_dir)
    assert run(*scored, "--machine", machine_file) == 0


@pytest.mark.slow
def test_what_cannot_be_read_ends_a_run_before_anything_is_measured(
    served: Hub, write_recipe: RecipeWriter, capsys
) -> None:
    (served.folder / "own" / "model" / ".gated").touch()
    assert run("finetune", write_recipe(), *ON_HUB) == 1
    shown = capsys.readouterr()
    assert "Measuring" not in shown.out
    assert shown.err.startswith(
        "error: model.path: own/model is gated, and this machine has no tok"
    )
    assert run("validate", write_recipe(), *ON_HUB) == 1
