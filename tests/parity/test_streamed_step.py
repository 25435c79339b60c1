"""The engine against itself resident (grade MOVE) and against transformers + peft (REORDER)."""

import _thread
import copy
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import offload
from finetune.adapter import lora as adapters
from finetune.data.steps import collate
from finetune.data.tokenize import encode
from finetune.model.load import load_model
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.adapters import LoraSection
from finetune.recipe.sections import ModelSection
from finetune.training.optimizer import clip, make_optimizer, update
from offload.engine.batch import with_labels
from offload.engine.engine import Engine
from offload.engine.host.pagelock import aligned_empty
from offload.engine.host.slab import by_place
from offload.engine.model.layers import Front
from offload.engine.passes.part import Part, RunStep
from offload.engine.passes.scoring import SwitchedModel
from offload.engine.results import PassState
from offload.engine.streams import CpuDevice
from offload.errors import OffloadError
from offload.plan.schedule.op import Lane
from offload.plan.schedule.schedule import (
    Order,
    Passes,
    Schedule,
    TransferSizes,
    cold_ring,
)
from tests.checkpoints import loaded
from tests.conversations import read_conversations
from tests.doubles import HookedDevice
from tests.parity import steps
from tests.parity.architectures import rel_error
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    plain,
    resident,
    streamed,
    tiny,
    truth_of,
    with_lora,
)
from tests.schedules import training_schedule, with_ops
from tests.tiers import diagonal, mostly_slow


@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3_moe"))
def test_move_streamed_equals_resident_to_the_bit(name: str) -> None:
    model = tiny(name)
    for num_slots in (2, 3):
        assert_equal(streamed(model, num_slots=num_slots), resident(name))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.exhaustive),
    ],
)
def test_reorder_gradients_are_no_worse_than_those_of_transformers_and_peft(name: str) -> None:
    """Over several models, since for a single one the ratio of two roundings is 1 +- 0.2."""
    ours_squared = reference_squared = 0.0
    for seed in range(6):
        model = tiny(name, seed=seed)
        truth = truth_of(model)
        reference_loss, reference = plain(model)
        loss, ours = streamed(model, num_slots=2)
        assert loss == pytest.approx(reference_loss, rel=1e-6)
        ours_squared += rel_error(ours, truth) ** 2
        reference_squared += rel_error(reference, truth) ** 2
    assert ours_squared <= 1.05**2 * reference_squared
    assert reference_squared < 6 * 1e-5**2


@pytest.mark.thorough
def test_move_dropout_is_replayed_in_the_recompute() -> None:
    model = tiny("qwen3", dropout=0.3)
    assert_equal(streamed(model, num_slots=2), streamed(model, num_slots=NUM_LAYERS))
    other = streamed(model, num_slots=2, seed=1)
    assert other[0] != streamed(model, num_slots=2)[0]


def test_dropout_gradients_are_those_of_one_and_the_same_mask() -> None:
    """Under another mask in the recompute, a gradient would not be the slope of the loss."""
    model = tiny("qwen3", dropout=0.3)
    _, found = streamed(model, num_slots=2, seed=5)
    name = max((n for n in found if "lora_B" in n), key=lambda n: float(found[n].abs().max()))
    place = int(found[name].abs().argmax())
    losses = []
    for move in (0.005, -0.005):  # halving it takes the error of the slope to a quarter
        moved = copy.deepcopy(model)
        with torch.no_grad():
            dict(moved.named_parameters())[name].view(-1)[place] += move
        losses.append(streamed(moved, num_slots=2, seed=5)[0])
    slope = (losses[0] - losses[1]) / 0.01
    assert found[name].view(-1)[place].item() == pytest.approx(slope, rel=0.01)


@pytest.mark.parametrize("name", mostly_slow(["qwen3", "qwen3_moe", "gemma3_text"], "qwen3"))
@pytest.mark.parametrize("kept_graphs", [0, NUM_LAYERS])
def test_move_each_micro_batch_passes_all_layers_by_itself(name: str, kept_graphs: int) -> None:
    """To the bit: each gradient is added up over micro-batches in the same order."""
    model = tiny(name, dropout=0.3)
    expected = streamed(model, num_slots=NUM_LAYERS)
    for num_slots in (2, NUM_LAYERS):
        options = replace(
            OPTIONS,
            num_slots=num_slots,
            num_kept_graphs=kept_graphs,
            order=Order.MICRO_BATCH_MAJOR,
        )
        ours = copy.deepcopy(model)
        engine = Engine(ours, device=torch.device("cpu"), options=options)
        result = engine.forward_backward(micro_batches(), dropout_seed=0)
        assert_equal((result.loss, gradients(ours)), expected)
        loads = 2 + 4 * len(micro_batches())  # at first the slots are empty
        assert result.num_loads == (loads if num_slots == 2 else 0)
        engine.detach()


def test_one_micro_batch_at_a_time_is_in_memory_where_each_passes_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []
    enter = PassState.enter

    def entered(state: PassState, m: int, front: Front) -> None:
        enter(state, m, front)
        alive.append(max(len(state.fronts), len(state.inputs), len(state.gradient)))

    monkeypatch.setattr(PassState, "enter", entered)
    streamed(tiny("qwen3"), num_slots=2, order=Order.MICRO_BATCH_MAJOR)
    assert alive == [1] * len(micro_batches())


@pytest.mark.thorough
def test_late_copies_change_nothing() -> None:
    model = tiny("qwen3")
    expected = streamed(model, num_slots=NUM_LAYERS)
    jitter = random.Random(0)

    def late(number: int, lane: Lane, body: Callable[[], None]) -> None:
        time.sleep(jitter.random() * 0.01 if lane is Lane.H2D else 0)
        body()

    engine = Engine(model, device=HookedDevice(late), options=OPTIONS)
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((result.loss, gradients(model)), expected)
    engine.detach()


@pytest.mark.thorough
def test_loads_are_counted_from_cold_and_steady_and_after_an_evaluation() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    assert engine.forward_backward(micro_batches()).num_loads == 6
    assert engine.forward_backward(micro_batches()).num_loads == 4
    assert engine.forward(micro_batches()[0]).num_loads == 2
    assert engine.forward_backward(micro_batches()).num_loads == 6
    engine.detach()


def test_logits_without_gradients_equal_the_plain_model() -> None:
    model = tiny("qwen3_moe").eval()
    batch = {k: v for k, v in micro_batches()[0].items() if k != "labels"}
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    engine = offload.attach(model, num_slots=2, device="cpu")
    logits = engine.forward(batch).logits
    last = engine.forward(batch, positions=torch.tensor([5, 7])).logits
    engine.detach()
    assert logits is not None
    assert last is not None
    assert torch.equal(logits[0], expected[0])
    assert torch.allclose(last[:, 0], expected[torch.arange(2), torch.tensor([5, 7])], atol=1e-6)


def test_detach_gives_the_model_back_as_it_was() -> None:
    model = tiny("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    engine.detach()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(offload.OffloadError, match="the engine is detached"):
        engine.forward_backward(micro_batches())


@pytest.mark.thorough
def test_trained_embeddings_get_the_gradients_of_the_plain_model() -> None:
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    model = with_lora(base)
    model.get_input_embeddings().weight.requires_grad_(True)
    truth = truth_of(model)
    _, ours = streamed(model, num_slots=2)
    assert any("embed_tokens" in name for name in ours)
    assert rel_error(ours, truth) < 1e-5


@pytest.mark.thorough
def test_checkpointing_and_cache_left_on_change_nothing() -> None:
    model = tiny("qwen3")
    expected = streamed(model, num_slots=2)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            setattr(module, "gradient_checkpointing", True)  # noqa: B010 - mypy knows a tensor
    model.config.use_cache = True
    assert_equal(streamed(model, num_slots=2), expected)


@pytest.mark.thorough
def test_a_failed_copy_is_an_error_and_the_next_step_is_right() -> None:
    model = tiny("qwen3")
    expected = streamed(model, num_slots=2)
    failures = [OSError("the link is down")]

    def fail_once(number: int, lane: Lane, body: Callable[[], None]) -> None:
        if failures and lane is Lane.H2D:
            raise failures.pop()
        body()

    engine = Engine(model, device=HookedDevice(fail_once), options=OPTIONS)
    with pytest.raises(offload.TransferError, match="the link is down"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    model.zero_grad()
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    assert_equal((result.loss, gradients(model)), expected)
    engine.detach()


def test_a_step_without_labels_is_refused() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    batch = micro_batches()[0]
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with pytest.raises(offload.OffloadError, match="none of the 1 micro-batches has a token"):
        engine.forward_backward([batch])
    engine.detach()


@pytest.mark.thorough
def test_a_module_that_two_layers_share_is_kept_out_of_the_slots() -> None:
    model = tiny("qwen3")
    base: Any = model.get_base_model()
    layers = base.model.layers
    layers[3].mlp = layers[1].mlp
    truth = truth_of(model)
    _, ours = streamed(model, num_slots=2)
    assert rel_error(ours, truth) < 1e-5


def test_a_loss_of_another_kind_is_refused_before_any_gradient() -> None:
    model = tiny("qwen3")
    base: Any = model.get_base_model()

    def smoothed_loss(logits, labels, vocab_size, **_) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1
        )

    base.loss_function = smoothed_loss
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="where the mean of cross-entropies is"):
        engine.forward_backward(micro_batches())
    assert all(p.grad is None for p in model.parameters())
    engine.detach()


@pytest.mark.thorough
def test_dropout_before_the_layers_follows_the_seed_and_positions_their_limit() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=20)
    model = get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_proj"], fan_in_fan_out=True)
    )
    model.train()
    engine = offload.attach(model, num_slots=2, device="cpu")
    first, again, other = (
        engine.forward_backward(micro_batches(), dropout_seed=seed).loss for seed in (1, 1, 2)
    )
    engine.detach()
    assert first == again
    assert first != other


def test_fewer_than_two_slots_are_refused() -> None:
    with pytest.raises(offload.OffloadError, match=r"num_slots is 1; .*at least 2"):
        offload.attach(tiny("qwen3"), num_slots=1, device="cpu")


@pytest.mark.thorough
def test_a_share_of_a_step_is_normalised_by_the_label_tokens_of_the_whole() -> None:
    """As where several processes share a step: the parts add up to the step done by one."""
    model = tiny("qwen3")
    batches = micro_batches()
    num_label_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    whole_loss, whole = streamed(model, num_slots=2)
    losses = []
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    for part in (batches[:1], batches[1:]):
        losses.append(engine.forward_backward(part, num_label_tokens=num_label_tokens).loss)
    engine.detach()
    assert sum(losses) == pytest.approx(whole_loss, rel=1e-6)
    assert rel_error(gradients(model), whole) < 1e-6


# -------------------------------------------------------------------------------------------- tiers


HIDDEN = 32


def stashed(name: str, *, order: Order = Order.LAYER_MAJOR, dropout: float = 0.0):
    model = tiny(name, dropout=dropout)
    engine = offload.attach(model, num_slots=2, device="cpu", stash="host", head_chunk_tokens=7)
    result = engine.forward_backward(micro_batches(), dropout_seed=0, order=order)
    engine.detach()
    return result, gradients(model)


@pytest.mark.disk
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3_moe"))
def test_move_inputs_that_waited_on_the_host_change_nothing(name: str) -> None:
    result, found = stashed(name)
    assert_equal((result.loss, found), resident(name))


@pytest.mark.disk
@pytest.mark.thorough
def test_move_inputs_on_the_host_change_nothing_in_the_usual_order_and_under_dropout() -> None:
    order = Order.MICRO_BATCH_MAJOR
    result, found = stashed("qwen3", order=order, dropout=0.2)
    expected = streamed(tiny("qwen3", dropout=0.2), num_slots=NUM_LAYERS, order=order)
    assert_equal((result.loss, found), expected)


@pytest.mark.disk
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


@pytest.mark.disk
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


@pytest.mark.disk
def test_the_disk_tier_without_a_directory_is_refused() -> None:
    with pytest.raises(offload.OffloadError, match=r'tier is "disk".*\n\nhint: `store_dir="DIR"`'):
        offload.attach(tiny("qwen3"), num_slots=2, device="cpu", tier="disk")


@pytest.mark.disk
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


@pytest.mark.disk
def test_layers_that_were_loaded_to_memory_are_not_taken_for_layers_on_disk() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    backing = engine._host._backing
    engine.detach()
    with pytest.raises(offload.OffloadError, match='tier is "disk" and the layers were loaded'):
        offload.attach(model, num_slots=2, device="cpu", tier="disk", backing=backing)


@pytest.mark.disk
def test_weights_that_train_on_the_host_cannot_lie_on_disk(tmp_path: Path) -> None:
    model = plain_tiers("qwen3")
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


def plain_tiers(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().train()


def train(
    name: str, *, num_slots: int, num_steps: int, trained_weights: Literal["device", "host"]
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Train all weights of a model by SGD; return losses, weights and loads."""
    model = plain_tiers(name)
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


@pytest.mark.disk
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3"))
def test_move_trained_layers_streamed_equal_trained_layers_resident(name: str) -> None:
    streamed_run = train(name, num_slots=2, num_steps=3, trained_weights="host")
    resident_run = train(name, num_slots=NUM_LAYERS, num_steps=3, trained_weights="host")
    assert streamed_run[0] == resident_run[0]
    assert all(torch.equal(streamed_run[1][n], w) for n, w in resident_run[1].items())


@pytest.mark.disk
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3_moe"))
def test_reorder_training_all_weights_follows_the_plain_model(name: str) -> None:
    model = plain_tiers(name)
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


@pytest.mark.disk
@pytest.mark.thorough
def test_an_update_makes_every_slot_stale_and_the_reloads_are_counted() -> None:
    _, _, loads = train("qwen3", num_slots=2, num_steps=3, trained_weights="host")
    assert loads == [2 * NUM_LAYERS - 2] * 3
    _, _, loads = train("qwen3", num_slots=NUM_LAYERS, num_steps=2, trained_weights="host")
    assert loads == [NUM_LAYERS] * 2


@pytest.mark.disk
@pytest.mark.thorough
def test_an_evaluation_between_step_and_update_leaves_no_old_weights_behind() -> None:
    def losses(*, is_evaluated: bool) -> list[float]:
        engine = offload.attach(
            plain_tiers("qwen3"), num_slots=NUM_LAYERS, device="cpu", trained_weights="host"
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


@pytest.mark.disk
def test_gradients_of_trained_layers_leave_the_device_once_whatever_the_micro_batches() -> None:
    model = plain_tiers("qwen3")
    layer_bytes = sum(p.numel() * 4 for p in model.get_decoder().layers.parameters())
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    for num in (1, 3):
        result = engine.forward_backward(micro_batches(num))
        assert 0 <= result.d2h_bytes - layer_bytes <= NUM_LAYERS * 4096  # whole pages
        for parameter in engine.trained_parameters.values():
            parameter.grad = None
    engine.detach()


@pytest.mark.disk
def test_masters_are_the_model_again_once_it_is_detached() -> None:
    model = plain_tiers("qwen3")
    names = [name for name, _ in model.named_parameters()]
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    trained = engine.trained_parameters
    assert sorted(trained) == sorted(names)
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    engine.forward_backward(micro_batches())
    assert all(p.grad is not None and p.grad.shape == p.shape for p in trained.values())
    engine.detach()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.disk
def test_a_gradient_that_was_not_used_is_an_error_and_not_overwritten() -> None:
    engine = offload.attach(plain_tiers("qwen3"), num_slots=2, device="cpu", trained_weights="host")
    engine.forward_backward(micro_batches())
    with pytest.raises(offload.OffloadError, match=r"still has the gradient.*\n\nhint: `optimizer"):
        engine.forward_backward(micro_batches())
    engine.detach()


@pytest.mark.disk
def test_a_gradient_from_before_the_model_was_attached_is_an_error() -> None:
    """Else the new one would be added to it, and what arrives on the host be anything."""
    model = plain_tiers("qwen3")
    plain_backward(model)
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.OffloadError, match=r"layers\.0.* still has the gradient"):
        engine.forward_backward(micro_batches())
    engine.detach()


@pytest.mark.disk
def test_the_usual_order_is_refused_where_layers_train_on_the_host() -> None:
    engine = offload.attach(plain_tiers("qwen3"), num_slots=2, device="cpu", trained_weights="host")
    with pytest.raises(offload.OffloadError, match="order is micro_batch_major"):
        engine.forward_backward(micro_batches(), order=Order.MICRO_BATCH_MAJOR)
    engine.detach()


@pytest.mark.disk
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


# -------------------------------------------------------------------------------------------- lanes


NUM_SLOTS = 2
HOLD_S = 5.0
Place = Literal["device", "host"]
Found = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What travels besides frozen weights."""

    stash: Place
    trained_weights: Place
    codec: str = "native"
    piece_bytes: int = 2**26


SETTINGS = {
    "weights only": Setting(stash="device", trained_weights="device"),
    "weights in pieces": Setting(stash="device", trained_weights="device", piece_bytes=7_000),
    "encoded weights": Setting(stash="device", trained_weights="device", codec="nf4"),
    "weights and inputs": Setting(stash="host", trained_weights="device"),
    "weights, inputs and gradients": Setting(stash="host", trained_weights="host"),
}


def engine_of(setting: Setting, device: CpuDevice, *, num_slots: int = NUM_SLOTS) -> Engine:
    model = tiny("qwen3")
    if setting.trained_weights == "host":
        model.requires_grad_(True)
    options = replace(
        OPTIONS,
        codec=setting.codec,
        num_slots=num_slots,
        stash=setting.stash,
        trained_weights=setting.trained_weights,
    )
    engine = Engine(model, device=device, options=options)
    engine._layered.token_bytes = 4 * model.config.hidden_size  # as its first pass finds it
    return engine


def run(
    setting: Setting, device: CpuDevice, *, num_slots: int = NUM_SLOTS, without: Any = None
) -> Found:
    """Run one step, perhaps with one wait left out; return its loss and its gradients."""
    engine = engine_of(setting, device, num_slots=num_slots)
    torch.manual_seed(0)
    try:
        batches = [with_labels(batch, device.torch_device) for batch in micro_batches(2)]
        schedule = drop(schedule_of(engine, setting), without)
        num_label_tokens = sum(batch.num_label_tokens for batch in batches)
        if setting.stash == "host":
            engine._bound.places.stash.prepare(
                by_place(
                    range(len(engine.layer_bytes) - 1), lambda _: engine._input_bytes(batches)
                ),
                num_buffers=schedule.num_fetch_buffers,
            )
        poison(engine)
        with engine._consistent(schedule.ring_after):
            part = Part(
                run=RunStep(micro_batches=()),
                passes=Passes(num_trained=len(batches), has_objective=False),
                batches=batches,
                model=SwitchedModel(engine._layered),
                num_label_tokens=num_label_tokens,
                ids=range(len(batches)),
            )
            engine._bound.executor.step(schedule, [part], is_stashed=setting.stash == "host")
            engine._bound.places.host_gradients.publish()
        trained = engine.trained_parameters.items()
        found = {name: p.grad.clone() for name, p in trained if p.grad is not None}
        assert len(found) == len(trained)
        return float(torch.stack(part.state.losses).sum()), found
    finally:
        engine.close()


def poison(engine: Engine) -> None:
    """Fill what a step reads with NaN: else it may hold the right values of the run before."""
    slots, stash = engine._bound.executor._transfers._slots, engine._bound.places.stash
    for buffer in (*slots._buffers, slots._decoded, *stash._buffers, stash._host):
        buffer.fill_(0xFF)


def schedule_of(engine: Engine, setting: Setting) -> Schedule:
    batches = [with_labels(batch, torch.device("cpu")) for batch in micro_batches(2)]
    return training_schedule(
        replace(engine._bound.sizes, piece_bytes=setting.piece_bytes),
        ring=cold_ring(len(engine._ring)),
        num_micro_batches=len(batches),
        order=Order.LAYER_MAJOR,
        trains_front=engine._trains_front,
        input_bytes=engine._input_bytes(batches) if setting.stash == "host" else (),
    )


def drop(schedule: Schedule, without: tuple[int, int] | None) -> Schedule:
    if without is None:
        return schedule
    number, wait = without
    ops = list(schedule.ops)
    kept = tuple(other for other in ops[number].waits if other != wait)
    ops[number] = ops[number]._replace(waits=kept)
    return with_ops(schedule, ops)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setting",
    mostly_slow(SETTINGS, "weights, inputs and gradients"),
)
def test_move_any_delay_in_any_lane_gives_the_bits_of_the_resident_step(setting: Setting) -> None:
    resident = replace(setting, stash="device", piece_bytes=2**26)
    expected = run(resident, CpuDevice(), num_slots=NUM_LAYERS)
    for seed in range(4):
        chance = random.Random(seed)

        def around(number: int, lane: Lane, body: Callable[[], None]) -> None:
            time.sleep(chance.choice([0, 0, 0.003]))  # noqa: B023 - used within this turn
            body()
            time.sleep(chance.choice([0, 0, 0.003]))  # noqa: B023

        assert_equal(run(setting, HookedDevice(around)), expected)


def waits_of(setting: Setting) -> list[tuple[int, int]]:
    """Return (op, op that it waits for) of the step that `run` runs."""
    engine = engine_of(setting, CpuDevice())
    ops = schedule_of(engine, setting).ops
    engine.close()
    return [(number, wait) for number, op in enumerate(ops) for wait in op.waits]


MANY_WAITS = {
    "weights in pieces": pytest.mark.slow,
    "encoded weights": pytest.mark.slow,
    "weights and inputs": pytest.mark.exhaustive,
    "weights, inputs and gradients": pytest.mark.slow,
}


class Held:
    """Holds one op back until another has run."""

    def __init__(self, *, number: int, wait: int) -> None:
        self._number, self._wait = number, wait
        self._has_run = threading.Event()
        self._is_let_go = False
        self.was_overtaken = False

    def __call__(self, number: int, lane: Lane, body: Callable[[], None]) -> None:
        if number == self._number:
            self.was_overtaken = not self._is_let_go
        if number == self._wait:
            self._has_run.wait(HOLD_S)
            self._is_let_go = True
        try:
            body()
        finally:
            if number == self._number:
                self._has_run.set()


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=MANY_WAITS.get(name, ()))
        for name, setting in SETTINGS.items()
    ],
)
def test_a_step_without_any_one_of_its_waits_goes_wrong(setting: Setting) -> None:
    """What was to be waited for is held back until the op that should have waited has run."""
    expected = run(setting, CpuDevice())
    for number, wait in waits_of(setting):
        held = Held(number=number, wait=wait)
        try:
            found = run(setting, HookedDevice(held), without=(number, wait))
        except (OffloadError, KeyError):
            found = None  # what it needed was not there yet
        assert held.was_overtaken
        if found is not None:
            with pytest.raises(AssertionError):
                assert_equal(found, expected)


def test_no_wait_is_implied_by_the_others() -> None:
    """Else the test above could not hold an op back: `run` would wait for ever."""
    sizes = TransferSizes(
        layer_bytes=(3,) * 5,
        gradient_bytes=(3,) * 5,
        decoded_bytes=(9, 0, 9, 9, 9),
        piece_bytes=1,
        num_staging=2,
    )
    ops = training_schedule(
        sizes,
        ring=cold_ring(2),
        num_micro_batches=3,
        order=Order.LAYER_MAJOR,
        trains_front=True,
        input_bytes=(1, 1, 1),
    ).ops
    for number, op in enumerate(ops):
        for wait in op.waits:
            others = [other for other in op.waits if other != wait]
            lane = [i for i in range(number) if ops[i].lane is op.lane]
            reached, stack = set(), [*others, *lane[-1:]]
            while stack:
                i = stack.pop()
                if i not in reached:
                    reached.add(i)
                    before = [j for j in range(i) if ops[j].lane is ops[i].lane]
                    stack += [*ops[i].waits, *before[-1:]]
            assert wait not in reached


# ------------------------------------------------------------------------------- larger than memory


LARGER_THAN_MEMORY_NUM_LAYERS, LARGER_THAN_MEMORY_HIDDEN, MLP = 24, 768, 2112
LAYER_BYTES = 4 * (
    4 * LARGER_THAN_MEMORY_HIDDEN * LARGER_THAN_MEMORY_HIDDEN + 3 * LARGER_THAN_MEMORY_HIDDEN * MLP
)
LIMIT_BYTES = 8 * LAYER_BYTES  # a third of the layers
LOADING: dict[str, Any] = {
    "codec": "native",
    "device": "cpu",
    "seed": 0,
    "tier": "disk",
    "experts_implementation": "eager",
}

CHILD = """
import json, re, resource, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
import offload
from finetune.model.load import load_model
from finetune.recipe.sections import ModelSection

torch.set_num_threads(1)

def used_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmData:\\s+(\\d+)", status).group(1))

def step(engine):
    tokens = torch.arange(2 * 16).view(2, 1, 16)
    return engine.forward_backward([{"input_ids": t, "labels": t} for t in tokens], dropout_seed=0)

# one small product, so that threads and their stacks are there before the limit is
(torch.rand(64, 64, requires_grad=True) @ torch.rand(64, 64)).sum().backward()
limit = used_bytes() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(int(sys.argv[3]) // 4)
    sys.exit("the limit does not limit")
except RuntimeError:
    pass
model = load_model(ModelSection(path=sys.argv[1], dtype="float32"), **json.loads(sys.argv[4]))
adapted = get_peft_model(model.model, LoraConfig(target_modules=["q_proj", "v_proj"]))
engine = offload.attach(adapted, num_slots=2, device="cpu", tier="disk", backing=model.backing)
losses = [step(engine).loss for _ in range(2)]
engine.close()
print(losses[0], losses[1], used_bytes() - limit + int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.disk
@pytest.mark.timeout(200)
def test_a_model_trains_from_disk_in_a_third_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=LARGER_THAN_MEMORY_HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LARGER_THAN_MEMORY_NUM_LAYERS,
        num_attention_heads=16,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="110MB")
    tokens = torch.arange(2 * 16).view(2, 1, 16)
    with torch.no_grad():
        losses = [float(model(input_ids=t, labels=t, use_cache=False).loss) for t in tokens]
    del model
    section = ModelSection(path=str(tmp_path / "model"), dtype="float32")
    load_model(section, **LOADING)  # writes the store
    sizes = (LIMIT_BYTES, LARGER_THAN_MEMORY_NUM_LAYERS * LAYER_BYTES)
    run = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "model", *map(str, sizes), json.dumps(LOADING)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    words = run.stdout.split()
    assert float(words[0]) == float(words[1]) == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert int(words[2]) < LIMIT_BYTES


# --------------------------------------------------------------------------------- quickstart model


QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
NUM_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 5, 3, 4


def batches() -> list[dict[str, torch.Tensor]]:
    tokenizer = load_tokenizer(ModelSection(path=str(QUICKSTART / "model")))
    rows = read_conversations(
        path=str(QUICKSTART / "train.jsonl"),
        data_format="messages",
        system=None,
    )
    size = MICRO_BATCH_SIZE
    assert isinstance(tokenizer.pad_token_id, int)
    return [
        collate(
            [encode(r, tokenizer, seq_len=128, loss_on="assistant") for r in rows[at : at + size]],
            pad_token_id=tokenizer.pad_token_id,
        )
        for at in range(0, NUM_STEPS * NUM_MICRO_BATCHES * size, size)
    ]


def steps_quickstart_model(num_slots: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    base = loaded(QUICKSTART / "model")
    section = LoraSection(rank=4, alpha=8, targets="attention", experts=True)
    model = adapters.add_lora(base.model, section, seed=0).train()
    trained = adapters.trained(model)
    assert any("experts" in name for name in trained)
    assert any("q_proj" in name for name in trained)
    optimizer = make_optimizer(
        trained, name="adamw", lr=0.01, weight_decay=0.0, loraplus_ratio=None
    )
    engine = offload.attach(model, num_slots=num_slots, device="cpu", backing=base.backing)
    found, data = [], batches()
    for step in range(NUM_STEPS):
        part = data[step * NUM_MICRO_BATCHES : (step + 1) * NUM_MICRO_BATCHES]
        result = engine.forward_backward(part, dropout_seed=step)
        gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        assert gradients.keys() == trained.keys()
        found.append((result.loss, gradients))
        clip(list(trained.values()), 1.0)
        update(optimizer, trained.values(), lr=0.01, loraplus_ratio=None)
    engine.detach()
    return found


@pytest.mark.slow
def test_move_five_steps_streamed_equal_five_steps_resident_to_the_bit() -> None:
    for ours, truth in zip(
        steps_quickstart_model(num_slots=3), steps_quickstart_model(num_slots=6), strict=True
    ):
        assert_equal(ours, truth)


# ------------------------------------------------------------------------------------------- faults


FAULTS_OPTIONS = replace(steps.OPTIONS, stash="host")


class Fault:
    """Raises once, in the first op of a lane that comes after some others."""

    def __init__(self, lane: Lane, after: int, error: BaseException) -> None:
        self._lane, self._after, self._error = lane, after, [error]

    def __call__(self, number: int, lane: Lane, body: Callable[[], None]) -> None:
        if lane is self._lane and number >= self._after and self._error:
            raise self._error.pop()
        body()


def check_recovery(engine: Engine, model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Check that the next step is right, that the lanes end, and that no weight was lost."""
    num_threads = threading.active_count()
    model.zero_grad()
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    found = result.loss, gradients(model)  # type: ignore[arg-type]
    assert_equal(found, resident("qwen3"))
    engine.detach()
    assert threading.active_count() == num_threads - (len(Lane) - 1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("lane", "after"), diagonal([Lane.H2D, Lane.D2H, Lane.COMPUTE], [0, 10, 20])
)
def test_an_error_in_any_lane_ends_the_step_and_not_the_engine(lane: Lane, after: int) -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    error = out_of_memory if lane is Lane.COMPUTE else OSError("the link is down")
    expected = torch.OutOfMemoryError if lane is Lane.COMPUTE else offload.TransferError
    engine = Engine(model, device=HookedDevice(Fault(lane, after, error)), options=FAULTS_OPTIONS)
    with pytest.raises(expected, match=r"out of memory|the link is down"):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    check_recovery(engine, model, before)


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_an_error_of_the_projects_own_is_raised_as_it_is_from_any_lane() -> None:
    error = offload.UnsupportedModelError("a", limit="b", hint="c")
    engine = Engine(
        tiny("qwen3"), device=HookedDevice(Fault(Lane.D2H, 0, error)), options=FAULTS_OPTIONS
    )
    with pytest.raises(offload.UnsupportedModelError, match="a; b"):
        engine.forward_backward(micro_batches())
    engine.detach()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Take Ctrl-C as Python does, where a shell started this in the background to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
@pytest.mark.thorough
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_the_step_waits_for_a_copy_ends_it() -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    interrupts = [True]

    def around(number: int, lane: Lane, body: Callable[[], None]) -> None:
        if lane is Lane.H2D and interrupts:
            interrupts.pop()
            time.sleep(0.5)  # until the main thread waits for this copy
            _thread.interrupt_main()
            time.sleep(0.2)
        body()

    engine = Engine(model, device=HookedDevice(around), options=FAULTS_OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        engine.forward_backward(micro_batches(), dropout_seed=0)
    check_recovery(engine, model, before)


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_an_evaluation_that_fails_leaves_the_next_step_right() -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    fault = Fault(Lane.H2D, 0, OSError("the link is down"))
    engine = Engine(model, device=HookedDevice(fault), options=FAULTS_OPTIONS)
    with pytest.raises(offload.TransferError, match="h2d lane failed"):
        engine.forward(micro_batches()[0])
    check_recovery(engine, model, before)


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_an_attachment_that_fails_half_way_gives_the_model_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("qwen3")
    before = copy.deepcopy(dict(model.named_parameters()))
    num_threads = threading.active_count()

    def empty(num_bytes: int) -> torch.Tensor:
        if num_bytes > 10_000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return aligned_empty(num_bytes)

    monkeypatch.setattr("offload.engine.engine.aligned_empty", empty)
    with pytest.raises(torch.OutOfMemoryError):
        offload.attach(model, num_slots=2, device="cpu")
    monkeypatch.undo()
    assert threading.active_count() == num_threads
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert_equal(streamed(model, num_slots=2), resident("qwen3"))
