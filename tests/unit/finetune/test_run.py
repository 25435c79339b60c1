"""A run's directory: its lock, checkpoints, metrics and states."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import EarlyStoppingCallback

from finetune import interrupts
from finetune.errors import CheckpointError, ConfigError
from finetune.files.manifest import whole_folder
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import (
    Recipe,
    differences,
    resolved_yaml,
    with_settings,
)
from finetune.run import checkpoint, run_files
from finetune.run.checkpoint import FIRST, Checkpoints, LossScale, state_form
from finetune.run.probe_folder import (
    PROBE,
    ProbeFigures,
    read_figures,
    read_head,
    read_probe,
    read_steps,
    write_probe,
)
from finetune.run.references import REFERENCES, read_references, write_references
from finetune.run.run_dir import RunDir, as_begun
from finetune.run.run_files import PHASES, Evaluations, line_of, read_rows
from finetune.run.run_lock import LOCK_FILE, holder, locked

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


# ----------------------------------------------------------------------------------------- run lock


ROOT = Path(__file__).parents[3]
HOLD = """
import sys
from pathlib import Path
from finetune.run.run_lock import locked
with locked(Path(sys.argv[1])):
    sys.stdout.write("held\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


def test_who_holds_a_lock_is_said_and_a_kill_releases_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    who = f"process {process.pid} on {socket.gethostname()}, since 20"
    with pytest.raises(CheckpointError, match=re.escape(f"{folder} is in use by {who}")):
        locked(folder).__enter__()
    assert str(holder(folder)).startswith(who)
    process.kill()
    process.communicate()
    assert holder(folder) is None
    with locked(folder) as notes:
        assert notes == ()
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on"):
            locked(folder).__enter__()


def test_a_directory_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "name"):
        assert (tmp_path / "runs" / "name" / LOCK_FILE).exists()
    assert not (tmp_path / "runs").exists()
    with locked(tmp_path / "runs"):
        (tmp_path / "runs" / "recipe.yaml").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("call", ["mkdir", "open", "fsync"])
def test_a_signal_while_a_lock_is_taken_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(os, call, signalled)
    with interrupts.raised(), pytest.raises(interrupts.Interrupted), locked(tmp_path / "a" / "b"):
        raise AssertionError
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with locked(tmp_path) as (note,):
        assert note == (
            f"{tmp_path} cannot be locked (No locks available): see that no other process writes"
            " this run"
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/run", "Not a directory"),
        ("file", "File exists"),
        ("x" * 300, "File name too long"),
        ("null\0byte", "embedded null byte"),
    ],
)
def test_a_path_that_cannot_be_a_directory_is_refused(
    name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"cannot be written: {reason}"):
        locked(tmp_path / name).__enter__()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be written: Too many levels"):
        locked(tmp_path).__enter__()
    assert not (tmp_path / "elsewhere").exists()


# --------------------------------------------------------------------------------------- checkpoint


Optimizer = torch.optim.Optimizer


def make() -> tuple[dict[str, nn.Parameter], Optimizer]:
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(4, 3)), "b": nn.Parameter(torch.randn(5))}
    return parameters, torch.optim.AdamW(parameters.values(), lr=0.1)


def trained(num_updates: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
    parameters, optimizer = make()
    for _ in range(num_updates):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters, optimizer


def load(checkpoints: Checkpoints, step: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
    parameters, optimizer = make()
    restored = checkpoints.read(step, parameters, data_hash="rows", form=FORM)
    restored.put_into(parameters, optimizer)
    return parameters, optimizer


FORM = state_form(trained(1)[1])


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """After steps 2 and 4."""
    saved = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4):
        saved.save(step, *trained(step), data_hash="rows", num_kept=2)
    return saved


def test_a_checkpoint_is_loaded_as_it_was_saved(checkpoints: Checkpoints) -> None:
    checkpoints.require_whole(4)
    parameters, optimizer = load(checkpoints, 4)
    expected, other = trained(4)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    for index, state in other.state_dict()["state"].items():
        found = optimizer.state_dict()["state"][index]
        assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    "name", ["trained.safetensors", "optimizer.pt", "state.json", "manifest.json"]
)
def test_one_flipped_bit_is_named_and_the_older_checkpoint_offered(
    name: str, checkpoints: Checkpoints
) -> None:
    folder = checkpoints.folder(4)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 8] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"step-0000004 is damaged: {name}") as raised:
        load(checkpoints, 4)
    assert str(checkpoints.folder(2)) in raised.value.hint
    assert "after step 2" in raised.value.hint
    load(checkpoints, 2)


def test_an_older_checkpoint_is_offered_only_if_it_is_whole(checkpoints: Checkpoints) -> None:
    for step in (2, 4):
        (checkpoints.folder(step) / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing") as raised:
        checkpoints.require_whole(4)
    removed = f"`rm -r {checkpoints.folder(4)} {checkpoints.folder(2)}`"
    assert raised.value.hint.startswith(removed)
    assert "begins with step 1 again" in raised.value.hint


def test_a_manifest_that_is_gone_is_missed(checkpoints: Checkpoints) -> None:
    (checkpoints.folder(4) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        load(checkpoints, 4)


def change_trained(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change what a checkpoint has of a run, as another run would have written it."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    files.pop("manifest.json")
    with whole_folder(folder) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)
        tensors = load_file(partial / "trained.safetensors")
        change(tensors)
        save_file(tensors, partial / "trained.safetensors")


def put_nan(tensor: torch.Tensor) -> None:
    tensor.view(-1)[0] = torch.nan


TRAINED: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "a in trained.safetensors is (3,) of torch.float32, the run's is (4, 3)": lambda tensors: (
        tensors.update(a=tensors["a"][0].clone())  # broadcasts
    ),
    "b in trained.safetensors is (5,) of torch.float64": lambda tensors: tensors.update(
        b=tensors["b"].double()
    ),
    "a in trained.safetensors has values that are not finite": lambda tensors: put_nan(
        tensors["a"]
    ),
    "trained.safetensors lacks b": lambda tensors: tensors.pop("b"),
    "trained.safetensors holds, and the run does not train, c": lambda tensors: tensors.update(
        c=torch.ones(1)
    ),
}


@pytest.mark.parametrize("what", TRAINED)
def test_tensors_that_are_not_the_runs_are_refused(what: str, checkpoints: Checkpoints) -> None:
    change_trained(checkpoints.folder(4), TRAINED[what])
    with pytest.raises(CheckpointError) as raised:
        load(checkpoints, 4)
    assert f"step-0000004 is damaged: {what}" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_states_of_another_optimizer_are_refused(
    checkpoints: Checkpoints, kind: type[Optimizer], settings: dict[str, Any]
) -> None:
    """Its run would go on with fresh states, or with those of another rule."""
    parameters, _ = make()
    other: Any = kind
    optimizer = other(parameters.values(), lr=0.1, **settings)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    checkpoints.save(6, parameters, optimizer, data_hash="rows", num_kept=3)
    with pytest.raises(CheckpointError, match="has the states of another optimizer: "):
        load(checkpoints, 6)


def test_states_of_another_type_are_refused(checkpoints: Checkpoints) -> None:
    parameters, optimizer = trained(6)
    states = optimizer.state_dict()["state"][1]
    states["exp_avg"] = states["exp_avg"].bfloat16()
    checkpoints.save(6, parameters, optimizer, data_hash="rows", num_kept=3)
    with pytest.raises(CheckpointError, match=r"state/1/exp_avg in optimizer\.pt is \(5,\), torch"):
        load(checkpoints, 6)


def test_a_parameter_without_a_gradient_so_far_has_no_states(checkpoints: Checkpoints) -> None:
    parameters, optimizer = make()
    parameters["a"].grad = torch.randn(4, 3)
    optimizer.step()
    checkpoints.save(6, parameters, optimizer, data_hash="rows", num_kept=3)
    assert list(load(checkpoints, 6)[1].state_dict()["state"]) == [0]


def test_states_that_are_not_finite_are_refused(checkpoints: Checkpoints) -> None:
    parameters, optimizer = trained(6)
    put_nan(optimizer.state_dict()["state"][0]["exp_avg_sq"])
    checkpoints.save(6, parameters, optimizer, data_hash="rows", num_kept=3)
    with pytest.raises(CheckpointError, match=r"state/0/exp_avg_sq in optimizer\.pt has values"):
        load(checkpoints, 6)


def test_a_step_that_is_not_the_folders_is_refused(checkpoints: Checkpoints) -> None:
    checkpoints.folder(4).rename(checkpoints.folder(6))
    with pytest.raises(CheckpointError, match=r"state\.json is of step 4, the folder of 6"):
        load(checkpoints, 6)


def test_folders_of_other_names_are_no_checkpoints(checkpoints: Checkpoints) -> None:
    (checkpoints.path / "step-best").mkdir()
    (checkpoints.path / "step-0000009").mkdir()
    (checkpoints.path / "step-0000009" / "notes.txt").write_text("mine")
    assert checkpoints.steps() == [2, 4]


def test_a_parameter_without_gradients_so_far_may_have_no_states(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    parameters, optimizer = make()
    parameters["a"].grad = torch.ones(4, 3)
    optimizer.step()
    saved.save(1, parameters, optimizer, data_hash="rows", num_kept=1)
    _, resumed = load(saved, 1)
    assert set(resumed.state_dict()["state"]) == {0}


def test_a_disk_that_is_full_costs_no_older_checkpoint(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-0000006 cannot be written: .*too large"):
            checkpoints.save(6, *trained(6), data_hash="rows", num_kept=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in checkpoints.path.iterdir()) == [
        "step-0000002",
        "step-0000004",
    ]
    load(checkpoints, 4)


# -------------------------------------------------------------------------------------- evaluations


def theirs(losses: list[float], *, patience: int, min_delta: float) -> tuple[int | None, float]:
    """Run transformers' callback; return after which loss it stops, and the lowest until then."""
    callback = EarlyStoppingCallback(patience, min_delta)
    args: Any = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    state: Any = SimpleNamespace(best_metric=None)
    control: Any = SimpleNamespace(should_training_stop=False)
    for number, loss in enumerate(losses, 1):
        callback.on_evaluate(args, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # Trainer does so afterwards
            state.best_metric = loss
        if control.should_training_stop:
            return number, state.best_metric
    return None, state.best_metric


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("min_delta", [0.0, 0.05])
@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_stops_after_the_evaluation_after_which_transformers_does(
    patience: int, min_delta: float, seed: int
) -> None:
    chance = random.Random(seed)
    losses = [2 - 0.03 * number + chance.random() / 5 for number in range(30)]
    found, stopped = Evaluations(patience=patience, min_delta=min_delta), None
    for number, loss in enumerate(losses, 1):
        found = found.after(number, loss)
        if found.are_enough:
            stopped = number
            break
    assert (stopped, found.lowest) == theirs(losses, patience=patience, min_delta=min_delta)


def test_a_fall_that_is_too_small_is_the_best_and_still_counts_as_none() -> None:
    found = Evaluations(patience=2, min_delta=0.1)
    for step, loss in ((10, 1.0), (20, 0.95), (30, 0.92)):
        assert not found.are_enough
        found = found.after(step, loss)
    assert found.are_enough
    assert (found.best_step, found.best_loss) == (30, 0.92)


def test_rows_of_a_run_give_the_same_and_the_best_is_one_that_is_saved() -> None:
    none = Evaluations(patience=3, min_delta=0.0)
    rows: list[dict[str, Any]] = [
        {"step": 1},
        *({"step": s, "eval_loss": x} for s, x in ((2, 1.0), (4, 0.5), (6, 0.7))),
    ]
    live = none.after(2, 1.0).after(4, 0.5).after(6, 0.7)
    assert none.after_rows(rows, saved=[2, 4, 6]) == live
    assert (live.best_step, live.num_without) == (4, 1)
    lost = none.after_rows(rows, saved=[2, 6])
    assert (lost.best_step, lost.best_loss, lost.lowest, lost.num_without) == (6, 0.7, 0.5, 1)


# --------------------------------------------------------------------------------------- loss scale


@pytest.mark.parametrize("frac", [0.0, 0.02, 0.6])
def test_it_moves_as_torchs_scaler(frac: float, monkeypatch: pytest.MonkeyPatch) -> None:
    interval = 7
    monkeypatch.setattr(checkpoint, "INTERVAL", interval)
    chance, ours = random.Random(0), LossScale()
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == ours.factor == FIRST
    for _ in range(100):
        has_overflow = chance.random() < frac
        weight.grad = torch.tensor(float("inf" if has_overflow else "1"))
        scaler.step(optimizer)
        scaler.update()
        ours = ours.skipped() if has_overflow else ours.applied()
        assert ours.factor == scaler.get_scale()
        assert ours.num_good == scaler._get_growth_tracker()


def test_skipped_steps_are_counted_and_a_row_of_them_ends_with_one_that_is_applied() -> None:
    found = LossScale().skipped().applied().skipped().skipped()
    assert (found.num_skipped, found.num_in_a_row) == (3, 2)
    assert (found.applied().num_skipped, found.applied().num_in_a_row) == (3, 0)


def test_the_factor_stays_finite() -> None:
    largest = LossScale(factor=2.0**1023, num_good=checkpoint.INTERVAL - 1)
    assert largest.applied() == replace(largest, num_good=0)


# ------------------------------------------------------------------------------------------ metrics


METRICS_PHASES = dict.fromkeys(run_files.PHASES, 0.5)
ROWS = [
    {"step": step, "loss": 1.0 / step, "num_loads": 4, "phases_s": METRICS_PHASES, "parts_s": {}}
    for step in (1, 2, 3)
]
LINES = "".join(map(line_of, ROWS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "metrics.jsonl"
    found.write_text(LINES)
    return found


def test_rows_are_read_as_they_were_written(file: Path) -> None:
    assert read_rows(file) == ROWS
    assert read_rows(file.with_name("none")) == []


def test_every_flipped_bit_is_seen(file: Path) -> None:
    with file.open("r+b", buffering=0) as written:  # in place: a file cut to 0 first goes to disk
        for at, byte in enumerate(LINES.encode()):
            for changed in (*(byte ^ 1 << bit for bit in range(8)), byte):
                os.pwrite(written.fileno(), bytes([changed]), at)
                if changed == byte:
                    continue
                with pytest.raises(CheckpointError, match=r"metrics.jsonl:[123] cannot be read: "):
                    read_rows(file)
    assert read_rows(file) == ROWS


@pytest.mark.parametrize("num_bytes", range(1, 60))
def test_a_line_that_a_kill_has_torn_is_left_out(num_bytes: int, file: Path) -> None:
    file.write_text(LINES[:-num_bytes])
    assert read_rows(file) == (ROWS if num_bytes == 1 else ROWS[:2])


def test_rows_of_older_versions_are_taken_as_they_are(file: Path) -> None:
    old = json.dumps(ROWS[0])
    file.write_text(f'{old}\n{{"step": 2, "lo')
    assert read_rows(file) == ROWS[:1]
    file.write_text(f'{{"step": 1, "lo\n{old}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:1 cannot be read: it is not JSON"):
        read_rows(file)


# ------------------------------------------------------------------------------------- probe folder


HEAD = {"score.weight": torch.arange(6.0).reshape(2, 3)}
STEPS = [{"step": 1, "loss": 0.5}]


def write(folder: Path) -> None:
    figures = ProbeFigures(
        rows="a",
        num_steps=1,
        num_features=4,
        num_parameters=6,
        feature_bytes=48,
        predicted_pass_s=1.0,
        pass_s=1.0,
        steps_s=1.0,
    )
    write_probe(folder, HEAD, figures, STEPS)


def test_a_head_is_read_as_it_was_found(tmp_path: Path) -> None:
    assert read_head(tmp_path, rows="a") == (None, "")
    assert read_probe(tmp_path) is None
    write(tmp_path)
    found, note = read_head(tmp_path, rows="a")
    assert found is not None
    assert torch.equal(found["score.weight"], HEAD["score.weight"])
    assert "ended before" in note
    assert read_steps(tmp_path) == STEPS
    assert read_probe(tmp_path) == {**read_figures(tmp_path), "first": STEPS[0], "last": STEPS[0]}


def test_a_head_of_other_rows_or_that_was_changed_is_not_used(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_head(tmp_path, rows="b")[0] is None
    assert "it is of other rows" in read_head(tmp_path, rows="b")[1]
    file = tmp_path / PROBE / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    found, note = read_head(tmp_path, rows="a")
    assert found is None
    assert "head.safetensors is not what was written" in note


# --------------------------------------------------------------------------------------- references


def test_what_was_written_is_read_for_the_same_rows_only(tmp_path: Path) -> None:
    sums = {"train": np.array([-1 / 3, -2e-300]), "held_out": np.array([-7.0])}
    assert read_references(tmp_path, rows="a") is None
    write_references(tmp_path, sums, rows="a")
    found = read_references(tmp_path, rows="a")
    assert found is not None
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in sums.items()
    }
    assert read_references(tmp_path, rows="b") is None


def test_a_changed_file_is_not_read(tmp_path: Path) -> None:
    write_references(tmp_path, {"train": np.array([-1.5])}, rows="a")
    file = tmp_path / REFERENCES
    whole = file.read_text()
    for text in (whole.replace("-1.5", "-1.6"), whole[:-20], "{}", ""):
        file.write_text(text)
        assert read_references(tmp_path, rows="a") is None
