"""The engine against itself resident (grade MOVE) and against transformers + peft (REORDER)."""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import offload
from offload.engine.engine import Engine
from offload.engine.model.layers import Front
from offload.engine.results import PassState
from offload.plan.schedule.op import Lane
from offload.plan.schedule.schedule import Order
from tests.doubles import HookedDevice
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    plain,
    rel_error,
    resident,
    streamed,
    tiny,
    truth_of,
    with_lora,
)
from tests.tiers import mostly_slow


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


def test_a_model_with_shared_keys_and_values_is_refused() -> None:
    model = tiny("qwen3")
    model.config.num_kv_shared_layers = 2
    with pytest.raises(offload.UnsupportedModelError, match="num_kv_shared_layers is 2"):
        offload.attach(model, num_slots=2, device="cpu")


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
