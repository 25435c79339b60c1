"""What waits elsewhere: layers on disk, layer inputs on the host; and what trains on the host."""

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import offload
from offload.plan.schedule.schedule import Order
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    assert_equal,
    gradients,
    micro_batches,
    rel_error,
    resident,
    streamed,
    tiny,
)
from tests.tiers import mostly_slow

pytestmark = pytest.mark.disk

HIDDEN = 32


def stashed(name: str, *, order: Order = Order.LAYER_MAJOR, dropout: float = 0.0):
    model = tiny(name, dropout=dropout)
    engine = offload.attach(model, num_slots=2, device="cpu", stash="host", head_chunk_tokens=7)
    result = engine.forward_backward(micro_batches(), dropout_seed=0, order=order)
    engine.detach()
    return result, gradients(model)


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3_moe"))
def test_move_inputs_that_waited_on_the_host_change_nothing(name: str) -> None:
    result, found = stashed(name)
    assert_equal((result.loss, found), resident(name))


@pytest.mark.thorough
def test_move_inputs_on_the_host_change_nothing_in_the_usual_order_and_under_dropout() -> None:
    order = Order.MICRO_BATCH_MAJOR
    result, found = stashed("qwen3", order=order, dropout=0.2)
    expected = streamed(tiny("qwen3", dropout=0.2), num_slots=NUM_LAYERS, order=order)
    assert_equal((result.loss, found), expected)


@pytest.mark.thorough
def test_each_input_but_the_last_layers_crosses_the_link_once_each_way() -> None:
    result, _ = stashed("qwen3")
    num_tokens = sum(batch["input_ids"].numel() for batch in micro_batches())
    inputs_bytes = (NUM_LAYERS - 1) * num_tokens * HIDDEN * 4
    assert result.d2h_bytes == inputs_bytes
    on_device = streamed_result("device")
    assert on_device.d2h_bytes == 0
    assert result.h2d_bytes == on_device.h2d_bytes + inputs_bytes


def streamed_result(stash: Literal["device", "host"]):
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu", stash=stash)
    result = engine.forward_backward(micro_batches())
    engine.detach()
    return result


# -------------------------------------------------------------------------------------- disk tier


@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "gemma3_text"))
def test_move_layers_read_from_disk_change_nothing(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = offload.attach(
        model, num_slots=2, device="cpu", tier="disk", store_dir=str(tmp_path), head_chunk_tokens=7
    )
    assert any("layers are read from" in note for note in engine.notes)
    assert engine.slab_bytes == 0
    assert not list(tmp_path.iterdir())  # the file has no name any more, and goes with the engine
    engine.forward_backward(micro_batches(), dropout_seed=0)
    model.zero_grad()
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    found = result.loss, gradients(model)
    assert_equal(found, resident(name))
    assert result.num_loads == 2 * (NUM_LAYERS - 2)
    engine.detach()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_disk_tier_without_a_directory_is_refused() -> None:
    with pytest.raises(offload.OffloadError, match=r'tier is "disk".*\n\nhint: `store_dir="DIR"`'):
        offload.attach(tiny("qwen3"), num_slots=2, device="cpu", tier="disk")


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_directory_for_a_store_that_is_not_written_is_refused(
    tier: Literal["ram", "disk"], tmp_path: Path
) -> None:
    model = tiny("qwen3")
    backing = None
    if tier == "disk":
        first = offload.attach(
            model, num_slots=2, device="cpu", tier="disk", store_dir=str(tmp_path)
        )
        backing = first._host._backing
        first.detach()
    with pytest.raises(offload.OffloadError, match=r"store_dir is .*\n\nhint: "):
        offload.attach(
            model, num_slots=2, device="cpu", tier=tier, backing=backing, store_dir=str(tmp_path)
        )


def test_layers_that_were_loaded_to_memory_are_not_taken_for_layers_on_disk() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    backing = engine._host._backing
    engine.detach()
    with pytest.raises(offload.OffloadError, match='tier is "disk" and the layers were loaded'):
        offload.attach(model, num_slots=2, device="cpu", tier="disk", backing=backing)


def test_weights_that_train_on_the_host_cannot_lie_on_disk(tmp_path: Path) -> None:
    model = plain("qwen3")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(offload.OffloadError, match='trained_weights is "host" and tier is "disk"'):
        offload.attach(
            model,
            num_slots=2,
            device="cpu",
            tier="disk",
            store_dir=str(tmp_path),
            trained_weights="host",
        )
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


# ------------------------------------------------------------------------------------- full weights


def plain(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().train()


def train(
    name: str, *, num_slots: int, num_steps: int, trained_weights: Literal["device", "host"]
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Train all weights of a model by SGD; return losses, weights and loads."""
    model = plain(name)
    if trained_weights == "device":  # something must be left to stream
        model.get_decoder().layers[0].requires_grad_(False)
    engine = offload.attach(
        model, num_slots=num_slots, device="cpu", trained_weights=trained_weights
    )
    trained = engine.trained_parameters
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    losses, loads = [], []
    for step in range(num_steps):
        result = engine.forward_backward(micro_batches(), dropout_seed=step)
        losses.append(result.loss)
        loads.append(result.num_loads)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    engine.detach()
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, loads


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3"))
def test_move_trained_layers_streamed_equal_trained_layers_resident(name: str) -> None:
    streamed_run = train(name, num_slots=2, num_steps=3, trained_weights="host")
    resident_run = train(name, num_slots=NUM_LAYERS, num_steps=3, trained_weights="host")
    assert streamed_run[0] == resident_run[0]
    assert all(torch.equal(streamed_run[1][n], w) for n, w in resident_run[1].items())


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3_moe"))
def test_reorder_training_all_weights_follows_the_plain_model(name: str) -> None:
    model = plain(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = plain_backward(model)
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    found_losses, found, _ = train(name, num_slots=2, num_steps=3, trained_weights="host")
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert losses[2] < losses[0]
    assert rel_error(found, {n: p.detach() for n, p in model.named_parameters()}) < 1e-5


def plain_backward(model: nn.Module) -> float:
    batches = micro_batches()
    num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    loss = 0.0
    for batch in batches:
        part = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        part.backward()
        loss += part.item()
    return loss


@pytest.mark.thorough
def test_an_update_makes_every_slot_stale_and_the_reloads_are_counted() -> None:
    _, _, loads = train("qwen3", num_slots=2, num_steps=3, trained_weights="host")
    assert loads == [2 * NUM_LAYERS - 2] * 3
    _, _, loads = train("qwen3", num_slots=NUM_LAYERS, num_steps=2, trained_weights="host")
    assert loads == [NUM_LAYERS] * 2


@pytest.mark.thorough
def test_an_evaluation_between_step_and_update_leaves_no_old_weights_behind() -> None:
    def losses(*, is_evaluated: bool) -> list[float]:
        engine = offload.attach(
            plain("qwen3"), num_slots=NUM_LAYERS, device="cpu", trained_weights="host"
        )
        optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=0.5)
        found = []
        for step in range(3):
            found.append(engine.forward_backward(micro_batches(), dropout_seed=step).loss)
            if is_evaluated:
                engine.forward(micro_batches()[0])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        engine.detach()
        return found

    assert losses(is_evaluated=True) == losses(is_evaluated=False)


def test_gradients_of_trained_layers_leave_the_device_once_whatever_the_micro_batches() -> None:
    model = plain("qwen3")
    layer_bytes = sum(p.numel() * 4 for p in model.get_decoder().layers.parameters())
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    for num in (1, 3):
        result = engine.forward_backward(micro_batches(num))
        assert 0 <= result.d2h_bytes - layer_bytes <= NUM_LAYERS * 4096  # whole pages
        for parameter in engine.trained_parameters.values():
            parameter.grad = None
    engine.detach()


def test_masters_are_the_model_again_once_it_is_detached() -> None:
    model = plain("qwen3")
    names = [name for name, _ in model.named_parameters()]
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    trained = engine.trained_parameters
    assert sorted(trained) == sorted(names)
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    engine.forward_backward(micro_batches())
    assert all(p.grad is not None and p.grad.shape == p.shape for p in trained.values())
    engine.detach()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_gradient_that_was_not_used_is_an_error_and_not_overwritten() -> None:
    engine = offload.attach(plain("qwen3"), num_slots=2, device="cpu", trained_weights="host")
    engine.forward_backward(micro_batches())
    with pytest.raises(offload.OffloadError, match=r"still has the gradient.*\n\nhint: `optimizer"):
        engine.forward_backward(micro_batches())
    engine.detach()


def test_a_gradient_from_before_the_model_was_attached_is_an_error() -> None:
    """Else the new one would be added to it, and what arrives on the host be anything."""
    model = plain("qwen3")
    plain_backward(model)
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.OffloadError, match=r"layers\.0.* still has the gradient"):
        engine.forward_backward(micro_batches())
    engine.detach()


def test_the_usual_order_is_refused_where_layers_train_on_the_host() -> None:
    engine = offload.attach(plain("qwen3"), num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.OffloadError, match="order is micro_batch_major"):
        engine.forward_backward(micro_batches(), order=Order.MICRO_BATCH_MAJOR)
    engine.detach()


@pytest.mark.thorough
def test_an_adapter_beside_trained_layers_has_its_gradient_on_the_device() -> None:
    model = tiny("qwen3")
    norm = next(n for n, _ in model.named_parameters() if n.endswith("input_layernorm.weight"))
    dict(model.named_parameters())[norm].requires_grad_(True)
    reference = copy.deepcopy(model)
    plain_backward(reference)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="device")
    engine.forward_backward(micro_batches(), dropout_seed=0)
    assert engine.trained_parameters.keys() == expected.keys()
    found = {n: p.grad for n, p in engine.trained_parameters.items() if p.grad is not None}
    assert rel_error(found, expected) < 1e-5
    engine.detach()
