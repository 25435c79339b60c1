"""What of a run's directory is the run's own (#16)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune.errors import CheckpointError, ConfigError
from finetune.files.manifest import whole_folder
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import (
    Recipe,
    differences,
    resolved_yaml,
    with_settings,
)
from finetune.run.run_dir import RunDir, as_begun
from finetune.run.run_files import PHASES
from finetune.run.run_lock import locked

FILES = {
    "adapter/notes.txt": "which one is best",
    "adapter/data/rows.jsonl": "rows",
    "checkpoints/step-0000002/notes.txt": "a good one",
    "checkpoints/best/trained.safetensors": "a copy",
    "profile/mine.json": "figures",
    "wandb/settings": "mine",
    "notes.txt": "keep",
    "partial-results/thesis.txt": "years of work",
}


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("quickstart", [], check_files=False)


def _but_for_the_place(before: Recipe, after: Recipe) -> list[str]:
    return [one for one in differences(before, after) if not one.startswith("output.dir:")]


def row(step: int) -> dict[str, Any]:
    phases_s = dict.fromkeys(PHASES, 0.5)
    return {"step": step, "loss": 1.0, "num_loads": 4, "phases_s": phases_s, "parts_s": {}}


def write_run(run: RunDir, recipe: Recipe) -> None:
    """Write what a run of two steps leaves."""
    run.path.mkdir()
    run.start(recipe, experts_implementation="eager")
    run.append_metrics(row(1))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    for step in (1, 2):
        run.checkpoints.save(step, {"a": parameter}, optimizer, data_hash="", num_kept=2)
    with whole_folder(run.adapter) as folder:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors")
    for name in ("profile/trace.json", "wandb/run-20261122-abc/files/log.txt"):
        (run.path / name).parent.mkdir(parents=True)
        (run.path / name).write_text("{}")


def test_overwriting_takes_what_a_run_wrote_and_nothing_else(tmp_path, recipe) -> None:
    run = RunDir(tmp_path / "run")
    write_run(run, recipe)
    for name, text in FILES.items():
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(text)
    run.require_startable(may_overwrite=True)
    run.start(recipe, experts_implementation=None)
    left = {
        str(f.relative_to(run.path)): f.read_text() for f in run.path.rglob("*.*") if f.is_file()
    }
    left["wandb/settings"] = (run.path / "wandb" / "settings").read_text()
    left.pop("recipe.yaml")
    assert left == FILES
    assert run.checkpoints.steps() == []


def test_overwriting_follows_no_links(tmp_path, recipe) -> None:
    run = RunDir(tmp_path / "run")
    write_run(run, recipe)
    for name in ("adapter", "checkpoints"):
        (run.path / name).rename(tmp_path / f"other {name}")
        (run.path / name).symlink_to(tmp_path / f"other {name}")
    run.start(recipe, experts_implementation=None)
    assert not run.adapter.is_symlink()
    assert not run.checkpoints.path.is_symlink()
    assert (tmp_path / "other adapter" / "adapter_config.json").exists()
    assert (tmp_path / "other checkpoints" / "step-0000002" / "optimizer.pt").exists()


def test_a_recipe_of_the_users_own_is_no_run(tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {}")
    (tmp_path / "thesis.txt").write_text("years of work")
    for may_overwrite in (False, True):
        with pytest.raises(CheckpointError, match=f"{tmp_path} is there and holds no run"):
            RunDir(tmp_path).require_startable(may_overwrite=may_overwrite)


def test_a_start_that_was_killed_can_be_started_again(tmp_path, recipe) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "run.lock").touch()
    (tmp_path / "experts.json").write_text("{}")
    run.checkpoints.path.mkdir()
    run.require_startable(may_overwrite=False)
    run.start(recipe, experts_implementation=None)
    with pytest.raises(CheckpointError, match="holds a run already"):
        run.require_startable(may_overwrite=False)
    assert not _but_for_the_place(recipe, run.recipe())


def test_a_changed_recipe_of_a_run_is_refused(tmp_path, recipe) -> None:
    run = RunDir(tmp_path)
    run.start(recipe, experts_implementation=None)
    text = run.recipe_file.read_text()
    run.recipe_file.write_text(text.replace("seq_len: ", "seq_len: 1"))
    with pytest.raises(CheckpointError, match=r"recipe\.yaml is not what was written"):
        run.recipe()
    run.recipe_file.write_text("".join(text.splitlines(keepends=True)[1:-1]))  # of older versions
    assert not _but_for_the_place(recipe, run.recipe())


def test_a_run_goes_on_with_the_layer_kernels_that_it_began_with(tmp_path, recipe) -> None:
    run = RunDir(tmp_path)
    run.start(with_settings(recipe, {"model.layer_kernels": "fused"}), experts_implementation=None)
    assert as_begun(recipe, run.begun()).model.layer_kernels == "fused"
    assert (
        as_begun(
            with_settings(recipe, {"model.layer_kernels": "plain"}), run.begun()
        ).model.layer_kernels
        == "plain"
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_goes_on_wherever_its_embedding_and_head_are(tmp_path, num_ranks) -> None:
    asked = load_recipe("quickstart", [], check_files=False)
    run = RunDir(tmp_path)
    begun = with_settings(asked, {"offload.embeddings": "host", "offload.head": "host"})
    run.start(begun, experts_implementation=None)
    again = as_begun(asked, run.begun(), num_ranks=num_ranks)
    assert (again.offload.embeddings, again.offload.head) == ("host", "host")
    for one in (
        again,
        with_settings(asked, {"offload.embeddings": "device", "offload.head": "device"}),
    ):
        run.require_same_recipe(one)


def test_a_run_goes_on_packed_or_unpacked_as_it_began(tmp_path, recipe) -> None:
    run = RunDir(tmp_path)
    assert recipe.data.packing == "auto"
    run.start(with_settings(recipe, {"data.packing": "on"}), experts_implementation=None)
    assert as_begun(recipe, run.begun()).data.packing == "on"
    assert (
        as_begun(with_settings(recipe, {"data.packing": "off"}), run.begun()).data.packing == "off"
    )


def test_a_run_goes_on_with_its_shares_if_there_are_as_many_ranks(tmp_path, recipe) -> None:
    run = RunDir(tmp_path)
    run.start(with_settings(recipe, {"train.shares": (5, 3)}), experts_implementation=None)
    assert as_begun(recipe, run.begun(), num_ranks=2).train.shares == (5, 3)
    assert as_begun(recipe, run.begun(), num_ranks=3).train.shares == "auto"
    assert as_begun(
        with_settings(recipe, {"train.shares": (1, 1)}), run.begun(), num_ranks=2
    ).train.shares == (1, 1)
    run.require_same_recipe(with_settings(recipe, {"train.shares": (1, 1)}))


def test_a_recipe_of_a_run_that_is_no_text_is_refused(tmp_path, recipe) -> None:
    run = RunDir(tmp_path)
    run.start(recipe, experts_implementation=None)
    run.recipe_file.write_bytes(run.recipe_file.read_bytes().replace(b"seed", b"see\xe4"))
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        run.recipe()


def test_an_adapter_is_verified_wherever_it_is_read(tmp_path, recipe) -> None:
    run = RunDir(tmp_path / "run")
    write_run(run, recipe)
    assert run.require_adapter() == ()
    with locked(run.path):
        (note,) = run.require_adapter()
        assert note.startswith(f"{run.path} is in use by process ")
    weights = run.adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"adapter is damaged: adapter_model\.safetensors is"):
        run.require_adapter()
    (run.adapter / "manifest.json").unlink()
    assert run.require_adapter() == (f"{run.adapter} cannot be verified: it has no manifest.json",)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        run.require_adapter()


def test_lines_that_are_lost_are_said_to_be(tmp_path) -> None:
    run = RunDir(tmp_path)
    for step in (1, 3, 4):
        run.append_metrics(row(step))
    assert run.drop_metrics_after(3) == (
        f"{tmp_path / 'metrics.jsonl'} lacks 1 of 3 steps that were trained",
    )
    assert [row["step"] for row in run.read_metrics()] == [1, 3]


# ------------------------------------------------------------------------- a run that was moved


def begun_run(path: Path, recipe: Recipe) -> Path:
    """Write a run; return its recipe."""
    run = RunDir(path)
    output = recipe.output.model_copy(update={"dir": str(path)})
    write_run(run, recipe.model_copy(update={"output": output}))
    return run.recipe_file


def run_dir_of(file: Path, *overrides: str) -> Path:
    return load_recipe(str(file), overrides, check_files=False).output.run_dir


def test_the_recipe_in_a_copy_is_of_the_copy(tmp_path: Path, recipe: Recipe) -> None:
    first = begun_run(tmp_path / "a", recipe)
    assert run_dir_of(first) == tmp_path / "a"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = tmp_path / "b" / "recipe.yaml"
    assert "a\n" in copy.read_text().partition("dir: ")[2], "where it was begun"
    assert run_dir_of(copy) == tmp_path / "b"
    assert RunDir(tmp_path / "b").recipe().output.run_dir == tmp_path / "b"
    RunDir(tmp_path / "b").require_same_recipe(load_recipe(str(copy), [], check_files=False))


def test_a_moved_run_is_resumed_where_it_is_by_any_recipe_of_it(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_run(tmp_path / "a", recipe)
    moved = (tmp_path / "a").rename(tmp_path / "moved")
    for words in ([f"output.dir={moved}"], [f"output.dir={moved}", "output.name=renamed"]):
        asked = load_recipe("quickstart", words, check_files=False)
        RunDir(moved).require_same_recipe(asked)
    monkeypatch.chdir(tmp_path)
    assert run_dir_of(Path("moved/recipe.yaml")) == Path("moved")
    with pytest.raises(CheckpointError, match=r"started with: train.lr: "):
        RunDir(moved).require_same_recipe(
            load_recipe("quickstart", [f"output.dir={moved}", "train.lr=0.5"], check_files=False)
        )


def test_a_place_on_the_command_line_is_the_place(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = begun_run(tmp_path / "a", recipe)
    monkeypatch.chdir(tmp_path)
    assert run_dir_of(file, "output.dir=c") == Path("c")
    assert run_dir_of(file, "output.name=d") == Path("runs/d")
    assert run_dir_of(file, "output.name=d", "output.dir=c") == Path("c")


def test_an_edited_recipe_in_a_run_is_of_the_run_too(tmp_path: Path, recipe: Recipe) -> None:
    file = begun_run(tmp_path / "a", recipe)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:-1]))
    moved = (tmp_path / "a").rename(tmp_path / "moved")
    assert run_dir_of(moved / "recipe.yaml") == moved


@pytest.mark.parametrize("folders", [(), ("adapter", "model"), ("checkpoints",)])
def test_a_recipe_next_to_folders_that_are_no_run_s_names_its_own_directory(
    tmp_path: Path, recipe: Recipe, folders: tuple[str, ...]
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir()
    file = tmp_path / "recipe.yaml"
    file.write_text(resolved_yaml(recipe))
    assert run_dir_of(file) == Path("runs") / recipe.output.name


def test_a_recipe_taken_out_of_a_run_names_the_directory_that_it_had(
    tmp_path: Path, recipe: Recipe
) -> None:
    file = begun_run(tmp_path / "a", recipe)
    shutil.copy(file, tmp_path / "recipe.yaml")
    assert run_dir_of(tmp_path / "recipe.yaml") == tmp_path / "a"
