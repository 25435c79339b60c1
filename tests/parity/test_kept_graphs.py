"""Layers that keep their graph: the same bits as layers that are computed again (grade MOVE).

The graph of a kept layer looks at a slot, or at the decoded buffer, that others use meanwhile.
"""

import copy
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import offload
from offload.engine.engine import Engine
from offload.plan.facts.codec import CodecName
from offload.plan.schedule.op import Lane
from offload.plan.schedule.schedule import Order
from tests.doubles import HookedDevice
from tests.parity.exactness import adapted
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    assert_equal,
    gradients,
    micro_batches,
    tiny,
)
from tests.parity.tiny_models import balanced, tiny_model
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

Found = tuple[float, dict[str, torch.Tensor]]


def step(
    model: nn.Module,
    *,
    kept_graphs: int,
    num_slots: int = 2,
    codec: CodecName = "native",
    stash: Literal["device", "host"] = "device",
    order: Order = Order.LAYER_MAJOR,
    before: Literal["nothing", "step", "evaluation"] = "nothing",
) -> Found:
    """Return loss and gradients of a step, behind whatever else leaves the ring as it is then."""
    model = copy.deepcopy(model)
    engine = offload.attach(
        model,
        num_slots=num_slots,
        codec=codec,
        device="cpu",
        stash=stash,
        head_chunk_tokens=7,
        kept_graphs=kept_graphs,
    )
    try:
        if before != "nothing":
            engine.forward_backward(micro_batches(), dropout_seed=7, order=order)
            model.zero_grad()
        if before == "evaluation":
            engine.forward(micro_batches()[0])
        result = engine.forward_backward(micro_batches(), dropout_seed=0, order=order)
        return result.loss, gradients(model)  # type: ignore[arg-type] # as peft's models
    finally:
        engine.detach()


@pytest.mark.parametrize("name", mostly_slow(["gemma3_text", "qwen3_moe"], "gemma3_text"))
def test_move_graphs_are_kept_whether_weights_stay_in_their_slots_or_come_back(name: str) -> None:
    model = tiny(name, dropout=0.2)
    expected = step(model, kept_graphs=0)
    for num_slots, kept_graphs in ((3, 2), (2, 2), (2, 3), (2, 4), (4, 4)):
        found = step(model, kept_graphs=kept_graphs, num_slots=num_slots)
        assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("codec", mostly_slow(["nf4", "int8"], "nf4"))
def test_move_graphs_are_kept_of_layers_that_are_decoded_in_one_place(codec: CodecName) -> None:
    model = tiny("qwen3_moe", dropout=0.2)
    expected = step(model, kept_graphs=0, codec=codec)
    for kept_graphs in (1, 2, 4):
        assert_equal(step(model, kept_graphs=kept_graphs, codec=codec), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stash", "order"),
    mostly_slow(
        list(itertools.product(("device", "host"), Order)), ("host", Order.MICRO_BATCH_MAJOR)
    ),
)
def test_move_graphs_are_kept_wherever_inputs_wait_in_either_order(
    stash: Literal["device", "host"], order: Order
) -> None:
    model = tiny("qwen3", dropout=0.2)
    expected = step(model, kept_graphs=0, order=order)
    for kept_graphs in (1, 2, 3, 4):
        assert_equal(step(model, kept_graphs=kept_graphs, stash=stash, order=order), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "codec"),
    mostly_slow(
        list(itertools.product(("step", "evaluation"), ("native", "int8"))),
        ("evaluation", "int8"),
    ),
)
def test_move_graphs_are_kept_over_any_ring_that_a_pass_leaves(
    before: Literal["step", "evaluation"], codec: CodecName
) -> None:
    model = tiny("qwen3", dropout=0.2)
    expected = step(model, kept_graphs=0, codec=codec)
    assert_equal(step(model, kept_graphs=3, codec=codec, before=before), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow(["gpt_oss", "mixtral", "qwen3_moe"], "mixtral"))
def test_move_a_kept_graph_takes_the_gradient_of_the_router_loss(model_type: str) -> None:
    model = balanced(model_type)
    num_layers = len(offload_layers(model))
    expected = step(model, kept_graphs=0)
    without = copy.deepcopy(model)
    without.get_base_model().router_aux_loss_coef = 0.0  # type: ignore[operator]
    assert step(without, kept_graphs=0)[0] != expected[0]
    for kept_graphs in (1, num_layers):
        assert_equal(step(model, kept_graphs=kept_graphs), expected)


def offload_layers(model: Any) -> nn.ModuleList:
    return model.get_base_model().model.layers


@pytest.mark.thorough
def test_move_recorded_arguments_get_the_gradients_of_kept_graphs() -> None:
    model: Any = adapted(tiny_model("gemma4_text"))
    trained = model.get_base_model().model
    for module in (trained.embed_tokens_per_layer, trained.per_layer_model_projection):
        module.weight.requires_grad_(True)
    expected = step(model, kept_graphs=0)
    assert all(float(t.norm()) > 0 for name, t in expected[1].items() if "per_layer" in name)
    for kept_graphs in (1, len(trained.layers)):
        assert_equal(step(model, kept_graphs=kept_graphs), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("trained_weights", mostly_slow(["device", "host"], "host"))
def test_move_modules_saved_whole_and_weights_trained_on_the_host_learn_the_same(
    trained_weights: Literal["device", "host"],
) -> None:
    """Over two updates: the second step's graphs are of the new weights."""

    def trained(kept_graphs: int) -> list[torch.Tensor]:
        config = LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["post_attention_layernorm", "lm_head"]
        )
        torch.manual_seed(0)
        model = get_peft_model(MODELS["qwen3"](), config).train()
        for name, parameter in model.named_parameters():
            if "mlp.up_proj" in name and trained_weights == "host":
                parameter.requires_grad_(True)
        engine = offload.attach(
            model,
            num_slots=2,
            device="cpu",
            trained_weights=trained_weights,
            kept_graphs=kept_graphs,
        )
        optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=0.1)
        for seed in range(2):
            engine.forward_backward(micro_batches(), dropout_seed=seed)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        values = [p.detach().clone() for p in engine.trained_parameters.values()]
        engine.detach()
        return values

    expected = trained(0)
    for kept_graphs in (2, 4):
        assert all(map(torch.equal, trained(kept_graphs), expected))


# ------------------------------------------------------------------------------ what could go wrong


def on_hooked_device(model: nn.Module, around: Callable[..., None], codec: CodecName) -> Found:
    model = copy.deepcopy(model)
    options = replace(OPTIONS, num_kept_graphs=3, codec=codec)
    engine = Engine(model, device=HookedDevice(around), options=options)
    try:
        result = engine.forward_backward(micro_batches(), dropout_seed=0)
        return result.loss, gradients(model)  # type: ignore[arg-type] # as peft's models
    finally:
        engine.detach()


@pytest.mark.thorough
@pytest.mark.parametrize("codec", mostly_slow(["native", "int8"], "int8"))
def test_late_copies_change_no_gradient_of_a_kept_graph(codec: CodecName) -> None:
    model = tiny("qwen3")
    jitter = random.Random(0)

    def late(number: int, lane: Lane, body: Callable[[], None]) -> None:
        time.sleep(jitter.random() * 0.01 if lane is Lane.H2D else 0)
        body()

    assert_equal(on_hooked_device(model, late, codec), step(model, kept_graphs=0, codec=codec))


@pytest.mark.thorough
def test_a_kept_graph_reads_its_slot_so_these_tests_see_weights_that_are_not_back() -> None:
    """Without the two loads of the way down, autograd says nothing and gradients are wrong."""
    model = tiny("qwen3")
    loss, expected = step(model, kept_graphs=0)
    num_loads, num_inspected = 0, len(offload_layers(model))

    def lost(number: int, lane: Lane, body: Callable[[], None]) -> None:
        nonlocal num_loads
        num_loads += lane is Lane.H2D
        if lane is not Lane.H2D or num_loads <= num_inspected + len(offload_layers(model)):
            body()

    found_loss, found = on_hooked_device(model, lost, "native")
    assert num_loads == num_inspected + 2 * NUM_LAYERS - 2
    assert found_loss == loss
    is_wrong = {name: not torch.equal(found[name], expected[name]) for name in found}
    assert not any(wrong for name, wrong in is_wrong.items() if "layers.3." in name)
    assert all(wrong for name, wrong in is_wrong.items() if "layers.1." in name)


@pytest.mark.thorough
def test_kept_layers_are_computed_once_and_the_others_twice() -> None:
    model: Any = tiny("qwen3")
    num_visits = [0] * NUM_LAYERS
    for number, layer in enumerate(offload_layers(model)):

        def count(_module: nn.Module, _inputs: Any, layer: int = number) -> None:
            num_visits[layer] += 1

        layer.register_forward_pre_hook(count)
    engine = offload.attach(model, num_slots=2, device="cpu", kept_graphs=2)
    engine.forward_backward(micro_batches())
    num_visits = [0] * NUM_LAYERS  # the first step has others, in which the model is inspected
    engine.forward_backward(micro_batches())
    engine.detach()
    assert num_visits == [6, 6, 3, 3]


@pytest.mark.parametrize(("wrong", "right"), [(5, 4), (-1, 0)])
def test_more_graphs_than_layers_are_refused(wrong: int, right: int) -> None:
    with pytest.raises(
        offload.OffloadError,
        match=rf"kept_graphs is {wrong}; .* there are 4\n\nhint: `kept_graphs={right}`",
    ):
        offload.attach(tiny("qwen3"), num_slots=2, device="cpu", kept_graphs=wrong)
