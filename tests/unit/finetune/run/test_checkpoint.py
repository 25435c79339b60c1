"""Damaged and foreign checkpoints (#16): each is refused by name, and the older one is offered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from finetune.errors import CheckpointError
from finetune.files.manifest import whole_folder
from finetune.run.checkpoint import Checkpoints

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
    restored = checkpoints.read(step, parameters, data_hash="rows")
    restored.put_into(parameters, optimizer)
    return parameters, optimizer


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
