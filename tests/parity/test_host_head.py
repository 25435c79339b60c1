"""The output head in host memory: it computes in the slots of layers, and no bit differs."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForSequenceClassification

import offload
from offload.engine.engine import Engine
from offload.engine.passes.part import RunStep
from offload.errors import UnsupportedModelError
from offload.plan.memory.memory import HEAD
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Order
from tests.parity.objectives import ByRow, against_scored, pairs
from tests.parity.runs import assert_same, rows, together
from tests.parity.steps import (
    MODELS,
    OPTIONS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    steps,
    tiny,
    with_lora,
    with_outputs,
)
from tests.parity.untied_models import (
    KINDS,
    exact_types,
    found_with,
    model_of,
    passes_with,
    step_of,
    trained_layers_with,
    untied,
)
from tests.tiers import mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = replace(OPTIONS, head="host")
BOTH = (OPTIONS, HOST)
SIZES = {"in a slot": 64, "over two slots": 400, "over all slots": 1000}
"""Tokens that the head predicts, each 128 bytes; a layer of the tiny model takes 40 KiB."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    mostly_slow(
        [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)],
        ("qwen3_moe", torch.bfloat16),
        ("scaled", torch.float32),
        rest=pytest.mark.thorough,
    ),
)
def test_move_no_bit_differs_where_the_head_is_on_the_host(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    expected, plainly = steps(model, OPTIONS)
    actual, kinds = steps(model, HOST)
    assert_equal(actual, expected)
    assert Kind.HEAD not in plainly
    assert kinds.count(Kind.HEAD) == 1


@pytest.mark.parametrize(
    ("size", "num_slots"),
    [
        ("over two slots", 3),
        ("over all slots", 2),
        *(
            pytest.param(size, num_slots, marks=pytest.mark.thorough)
            for size in SIZES
            for num_slots in (2, 3, 4)
        ),
    ],
)
def test_move_no_bit_differs_where_the_head_is_wider_than_a_slot(size: str, num_slots: int) -> None:
    """Slots are counted without our own code, from the bytes of the parameters."""
    torch.manual_seed(0)
    model = with_outputs(tiny("qwen3", dropout=0.2), SIZES[size])
    options = [replace(one, num_slots=num_slots) for one in BOTH]
    assert_equal(*(step_of(model, one) for one in options))
    layers = model.get_base_model().model.layers
    slot_bytes = max(
        sum(p.nbytes for p in layer.parameters() if not p.requires_grad) for layer in layers
    )
    num_bytes = SIZES[size] * 32 * 4
    own = copy.deepcopy(model)
    engine = Engine(own, device=torch.device("cpu"), options=options[1])
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    spans = [span for span in result.timeline.spans if span.kind is Kind.HEAD]
    assert sum(span.num_bytes for span in spans) == num_bytes
    assert {span.lane for span in spans} == {Lane.H2D}
    covered = min(num_slots, -(-num_bytes // slot_bytes))  # a record has less than a page to spare
    assert len(spans) == covered
    assert engine.slot_bytes >= num_bytes
    engine.detach()


@pytest.mark.parametrize(
    "changes",
    [
        {"stash": "host", "num_sent_graphs": 1},
        {"num_kept_graphs": 4, "num_slots": 3},
        {"embeddings": "host"},
        pytest.param({"codec": "nf4"}, marks=pytest.mark.thorough),
        pytest.param({"num_kept_graphs": 2, "layer_kernels": "fused"}, marks=pytest.mark.thorough),
        pytest.param({"tier": "disk"}, marks=pytest.mark.thorough),
    ],
)
def test_move_no_bit_differs_with_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("tier") == "disk":
        changes = changes | {"store_dir": tmp_path}
    model = with_outputs(tiny("qwen3", dropout=0.2), 400)
    assert_equal(*(step_of(model, replace(one, **changes)) for one in BOTH))


def test_move_no_bit_differs_where_micro_batches_pass_one_after_the_other() -> None:
    model = with_outputs(tiny("llama"), 400)
    assert_equal(*(step_of(model, one, order=Order.MICRO_BATCH_MAJOR) for one in BOTH))


def test_move_no_bit_differs_where_rows_are_packed() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for one in ([5, 5], [3, 9, 4]):  # equal rows, and others
        ids = torch.randint(0, 64, (1, sum(one)), generator=generator)
        batches.append({"input_ids": ids, "labels": ids, "row_lens": torch.tensor(one)})
    assert_equal(*(step_of(tiny("qwen3"), one, batches) for one in BOTH))


def test_move_gradients_of_an_adapter_on_the_head_are_the_same() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    torch.manual_seed(0)
    model = get_peft_model(MODELS["qwen3"](), adapter).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    found = [step_of(model, one) for one in BOTH]
    assert_equal(*found)
    assert any("lm_head" in name for name in found[0][1])


def test_move_preference_losses_are_the_same_with_reference_and_scored_rows() -> None:
    found, kinds = [], []
    for options in BOTH:
        model = with_outputs(copy.deepcopy(tiny("qwen3")), 400)
        torch.manual_seed(1)
        nn.init.normal_(model.get_base_model().lm_head.weight, std=0.1)
        engine = Engine(model, device=torch.device("cpu"), options=options)
        batches = pairs(1, 2)
        objective = ByRow(against_scored, num_trained=6)
        one: dict[str, Any] = {"objective": objective, "scored": pairs(1, seed=7)}
        trained = engine.forward_backward(batches, dropout_seed=0, **one)
        spans = trained.timeline.spans
        kinds.append(sum(span.kind is Kind.HEAD for span in spans))
        evaluated = engine.evaluate(batches, **one)
        found.append((trained.loss, trained.metrics, evaluated.loss, gradients(model)))
        engine.detach()
    (loss, metrics, held_out, grads), (*own, own_grads) = found
    assert own == [loss, metrics, held_out]
    assert all(torch.equal(own_grads[name], grads[name]) for name in grads)
    assert kinds == [0, 2]  # for all passes, model and reference: a piece for each of two slots


def test_move_weights_of_layers_that_train_on_the_host_have_the_same_bits() -> None:
    """A layer under the head is loaded again within a step, before its update."""
    assert_equal(*map(trained_layers_with, BOTH))


def test_move_runs_that_share_a_step_are_what_they_are_alone() -> None:
    configs = ({"r": 4, "target_modules": ["q_proj"]}, {"r": 2, "target_modules": ["v_proj"]})
    runs = [RunStep(micro_batches=rows(i, 12, 9), dropout_seed=i) for i in range(2)]
    expected = together("qwen3", configs, runs)
    assert_same(together("qwen3", configs, runs, head="host"), expected)


def test_move_passes_without_gradients_are_the_same() -> None:
    for one, other in zip(*map(passes_with, BOTH), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


class Reads(TorchFunctionMode):
    """Notes where a weight is whenever something is computed with it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight
        self.addresses: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_of_its_form = func.__name__ in (
            "__get__",
            "__set__",
            "__len__",
            "data_ptr",
            "size",
            "dim",
        )
        if not is_of_its_form and any(x is self._weight for x in (*args, *kwargs.values())):
            self.addresses.append(self._weight.data_ptr())
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "model_type",
    tiered(exact_types(), default=("qwen3",), slow=("bloom", "gemma4_text", "opt", "rwkv")),
)
def test_the_head_computes_nowhere_but_on_the_device(model_type: str) -> None:
    """On a GPU a product with the weight on the host would fail."""
    model: Any = untied(model_type)
    engine = Engine(model, device=torch.device("cpu"), options=HOST)
    head = engine._bound.places.head
    assert head is not None
    assert head._on_device is not None
    with Reads(head.weight) as reads:
        engine.forward_backward(micro_batches())
        model.eval()
        ids = micro_batches()[0]["input_ids"]
        with suppress(UnsupportedModelError):  # some types only train
            engine.forward({"input_ids": ids})
            with engine.generation() as generation:
                for _ in range(2):
                    generation.next_logits({0: ids[:1, :4]})
    engine.detach()
    assert len(reads.addresses) >= len(micro_batches())
    assert set(reads.addresses) == {head._on_device.data_ptr()}


def test_the_logits_are_those_of_the_plain_model() -> None:
    """The reference is transformers alone, before the model is attached."""
    model: Any = with_outputs(tiny("qwen3"), 400).eval()
    ids = micro_batches()[0]["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    engine = offload.attach(model, num_slots=2, device="cpu", head="host")
    found = engine.forward({"input_ids": ids}).logits
    assert found is not None
    assert torch.equal(found, expected)
    engine.detach()


def test_between_passes_the_weight_has_its_values_and_is_held_once_on_the_host() -> None:
    model: Any = with_outputs(tiny("qwen3"), 400)
    weight = model.get_base_model().lm_head.weight
    values = weight.detach().clone()
    engine = Engine(model, device=torch.device("cpu"), options=HOST)
    engine.forward_backward(micro_batches())
    (arena,) = (arena for arena in engine.arenas if arena.name == HEAD)
    assert arena.num_bytes == values.nbytes == weight.untyped_storage().nbytes()
    slots = [block for arena in engine.arenas if arena.name == "slots" for block in arena.blocks]
    (memory,) = slots
    start = memory.data_ptr()
    assert not start <= weight.data_ptr() < start + memory.nbytes
    assert torch.equal(weight, values)
    assert torch.equal(model.get_base_model().state_dict()["lm_head.weight"], values)
    engine.detach()
    assert model.get_base_model().lm_head.weight is weight
    assert torch.equal(weight, values)


def test_the_weight_has_its_values_where_an_op_of_the_head_fails() -> None:
    model: Any = tiny("qwen3")
    head = model.get_base_model().lm_head
    values = head.weight.detach().clone()
    engine = Engine(model, device=torch.device("cpu"), options=HOST)
    expected = engine.forward_backward(micro_batches(), dropout_seed=0).loss

    def fail(_module: nn.Module, _args: Any, _output: Any) -> None:
        raise OverflowError("of the head")

    hook = head.register_forward_hook(fail)
    with pytest.raises(OverflowError, match="of the head"):
        engine.forward({"input_ids": micro_batches()[0]["input_ids"]})
    hook.remove()
    assert torch.equal(head.weight, values)
    assert engine.forward_backward(micro_batches(), dropout_seed=0).loss == expected
    engine.detach()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "trained": (lambda: adapted(modules_to_save=["lm_head"]), "is ModulesToSaveWrapper"),
    "unfrozen": (lambda: unfrozen(), "`lm_head` trains"),
    "no linear layer": (lambda: with_other_head(), "`lm_head` is Sequential"),
    "none": (lambda: classifier(), "has no output head"),
}


def adapted(*targets: str, **config: Any) -> nn.Module:
    adapter = LoraConfig(r=4, target_modules=["q_proj", *targets], **config)
    return get_peft_model(MODELS["qwen3"](), adapter)


def unfrozen() -> nn.Module:
    model: Any = tiny("qwen3")
    model.get_output_embeddings().weight.requires_grad_()
    return model


def with_other_head() -> nn.Module:
    model: Any = tiny("qwen3")
    model.get_base_model().lm_head = nn.Sequential(model.get_base_model().lm_head)
    return model


def classifier() -> nn.Module:
    return with_lora(LlamaForSequenceClassification(LlamaConfig(**SHAPE, pad_token_id=0)))


@pytest.mark.parametrize(("make", "what"), REFUSED.values(), ids=REFUSED)
def test_a_head_that_is_needed_on_the_device_is_refused_by_name(
    make: Callable[[], nn.Module], what: str
) -> None:
    model = make()
    with pytest.raises(UnsupportedModelError, match=what) as refused:
        offload.attach(model, num_slots=2, device="cpu", head="host")
    assert refused.value.hint == '`head="device"`'
    offload.attach(model, num_slots=2, device="cpu").detach()


# ---------------------------------------------------------------------------- each type of model


@pytest.mark.parametrize(
    "model_type", tiered(exact_types(), default=(), slow=("bloom", "gemma4_text", "opt", "rwkv"))
)
def test_move_each_type_of_model_has_the_same_bits(model_type: str) -> None:
    model = untied(model_type)
    assert_equal(*(found_with(model, one) for one in BOTH))
