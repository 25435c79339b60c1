"""Damaged and foreign checkpoints (#16): each is refused by name, and the older one is offered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from finetune.errors import CheckpointError
from finetune.run.checkpoint import Checkpoints, state_form
from offload.engine.seeding import NEWEST, Seeding

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


FORM = state_form(trained(1)[1])


def load(checkpoints: Checkpoints, step: int) -> tuple[dict[str, nn.Parameter], Optimizer]:
    parameters, optimizer = make()
    restored = checkpoints.read(step, parameters, optimizer, form=FORM, data_hash="rows")
    restored.put_into(parameters, optimizer)
    return parameters, optimizer


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """After steps 2 and 4."""
    saved = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4):
        saved.save(step, *trained(step), data_hash="rows", seeding=NEWEST, num_kept=2)
    return saved


def forget_manifest(folder: Path) -> None:
    """Make a checkpoint as older versions wrote it."""
    (folder / "manifest.json").unlink()
    (folder / "state.json").write_text(json.dumps({"step": 4, "data_hash": "rows"}))


def test_a_checkpoint_is_loaded_as_it_was_saved(checkpoints: Checkpoints) -> None:
    assert checkpoints.require_whole(4) is None
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
    with pytest.raises(CheckpointError, match="its manifest is missing"):
        load(checkpoints, 4)


def test_a_checkpoint_from_before_manifests_is_taken_and_said_to_be_unverified(
    checkpoints: Checkpoints,
) -> None:
    forget_manifest(checkpoints.folder(4))
    assert checkpoints.require_whole(4) == (
        f"{checkpoints.folder(4)} cannot be verified: an older version wrote it, without checksums"
    )
    load(checkpoints, 4)


def reload_seeding(checkpoints: Checkpoints) -> Seeding:
    return checkpoints.read(4, *make(), form=FORM, data_hash="rows").seeding


def test_a_checkpoint_names_how_dropout_is_seeded(checkpoints: Checkpoints) -> None:
    for seeding in Seeding:
        checkpoints.save(4, *trained(4), data_hash="rows", seeding=seeding, num_kept=2)
        assert reload_seeding(checkpoints) is seeding


def test_a_checkpoint_that_names_no_seeds_is_of_the_first_version(
    checkpoints: Checkpoints,
) -> None:
    forget_manifest(checkpoints.folder(4))
    assert reload_seeding(checkpoints) is Seeding.TUPLE_HASH


def test_seeds_of_a_later_version_are_refused_before_a_model_is_loaded(
    checkpoints: Checkpoints,
) -> None:
    forget_manifest(checkpoints.folder(4))
    state = {"step": 4, "data_hash": "rows", "seeding": 3}
    (checkpoints.folder(4) / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="version 3 of the seeds of dropout") as raised:
        checkpoints.require_whole(4)
    assert "knows 1 to 2" in raised.value.limit


@pytest.mark.parametrize(
    "scale",
    [None, "65536", {"factor": 0.0}, {"factor": "65536"}, {"factor": 1e999}, {"speed": 2.0}],
)
def test_a_run_in_float16_does_not_go_on_without_the_factor_of_its_loss(
    checkpoints: Checkpoints, scale: object
) -> None:
    """Gradients of a loss that is not scaled would vanish, and the run would learn little."""
    forget_manifest(checkpoints.folder(4))
    state = {"step": 4, "data_hash": "rows"} | ({} if scale is None else {"loss_scale": scale})
    (checkpoints.folder(4) / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="no good `loss_scale`"):
        checkpoints.read(4, *make(), form=FORM, data_hash="rows", is_scaled=True)


def test_a_checkpoint_with_other_groups_is_not_called_damaged(checkpoints: Checkpoints) -> None:
    forget_manifest(checkpoints.folder(4))
    parameters, _ = make()
    groups = [{"params": [parameter]} for parameter in parameters.values()]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with pytest.raises(CheckpointError, match="in 1 groups, this version in 2") as raised:
        checkpoints.read(4, parameters, optimizer, form=FORM, data_hash="rows")
    assert "rm -r" not in raised.value.hint


def change_trained(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "trained.safetensors")
    change(tensors)
    save_file(tensors, folder / "trained.safetensors")


def change_optimizer(folder: Path, change: Callable[[Any], None]) -> None:
    content = torch.load(folder / "optimizer.pt", weights_only=True)
    change(content)
    torch.save(content, folder / "optimizer.pt")


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
OPTIMIZER: dict[str, Callable[[Any], Any]] = {
    "optimizer.pt lacks the states of 2 parameters": lambda content: content["state"].clear(),
    "optimizer.pt lacks the states of 1 parameters": lambda content: content["state"].pop(1),
    "0/exp_avg in optimizer.pt is (3,) of torch.float32": lambda content: content["state"][
        0
    ].update(exp_avg=torch.zeros(3)),
    "1/exp_avg_sq in optimizer.pt is (5,) of torch.float16": lambda content: content["state"][
        1
    ].update(exp_avg_sq=torch.zeros(5).half()),
    "0/exp_avg_sq in optimizer.pt has values that are not finite": lambda content: put_nan(
        content["state"][0]["exp_avg_sq"]
    ),
    "optimizer.pt lacks 0/exp_avg": lambda content: content["state"][0].pop("exp_avg"),
    "optimizer.pt has taken 3 updates after 4 steps": lambda content: [
        state["step"].fill_(3) for state in content["state"].values()
    ],
    "optimizer.pt has weight_decay 0.5, the run 0.01": lambda content: content["param_groups"][
        0
    ].update(weight_decay=0.5),
    "optimizer.pt is of other parameters": lambda content: content["param_groups"][0].update(
        params=[1, 0]
    ),
    "optimizer.pt holds no optimizer": lambda content: content.clear(),
}


@pytest.mark.parametrize("what", TRAINED)
def test_tensors_that_are_not_the_runs_are_refused_without_a_manifest(
    what: str, checkpoints: Checkpoints
) -> None:
    forget_manifest(checkpoints.folder(4))
    change_trained(checkpoints.folder(4), TRAINED[what])
    with pytest.raises(CheckpointError) as raised:
        load(checkpoints, 4)
    assert f"step-0000004 is damaged: {what}" in str(raised.value)


@pytest.mark.parametrize("what", OPTIMIZER)
def test_states_that_are_not_the_runs_are_refused_without_a_manifest(
    what: str, checkpoints: Checkpoints
) -> None:
    forget_manifest(checkpoints.folder(4))
    change_optimizer(checkpoints.folder(4), OPTIMIZER[what])
    with pytest.raises(CheckpointError) as raised:
        load(checkpoints, 4)
    assert f"step-0000004 is damaged: {what}" in str(raised.value)


def test_a_step_that_is_not_the_folders_is_refused(checkpoints: Checkpoints) -> None:
    checkpoints.folder(4).rename(checkpoints.folder(6))
    with pytest.raises(CheckpointError, match=r"state\.json is of step 4, the folder of step 6"):
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
    saved.save(1, parameters, optimizer, data_hash="rows", seeding=NEWEST, num_kept=1)
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
            checkpoints.save(6, *trained(6), data_hash="rows", seeding=NEWEST, num_kept=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in checkpoints.path.iterdir()) == [
        "step-0000002",
        "step-0000004",
    ]
    load(checkpoints, 4)
