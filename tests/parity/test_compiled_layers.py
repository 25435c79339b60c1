"""Layers that torch compiles: they stream to the bit, and compute what they did before."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import offload
from finetune.adapter.lora import add_lora
from finetune.recipe.sections import AdapterSection
from finetune.training import compile as compiling
from finetune.training.compile import FAILURES, compile_layers, refusal
from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import Gradients, gradients, micro_batches, rel_error, streamed
from tests.parity.objectives import ByRow, in_order, pairs, plain_step
from tests.parity.tiny_models import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread", "fresh_compiler"),
    # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def fresh_compiler() -> Any:
    """Start without compiled code, and leave torch's settings as they were."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):
        yield
    torch._dynamo.reset()


def adapted(model_type: str, *, dropout: float = 0.0) -> nn.Module:
    base = tiny_model(model_type)
    has_experts = "moe" in model_type
    section = AdapterSection(
        rank=4,
        alpha=8,
        dropout=0.0 if has_experts else dropout,
        targets="attention",
        experts=has_experts,
    )
    model = add_lora(base, section, seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.train()


def step(model: nn.Module, *, num_slots: int, kept_graphs: int = 0) -> tuple[float, Gradients]:
    model = copy.deepcopy(model)
    compile_layers(LayeredModel(model).layers)  # a copy of it would not be compiled
    engine = offload.attach(model, num_slots=num_slots, device="cpu", kept_graphs=kept_graphs)
    try:
        loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
        return loss, gradients(model)
    finally:
        engine.detach()


@pytest.mark.long
@pytest.mark.parametrize(
    "model_type", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)]
)
def test_compiled_layers_stream_to_the_bit_and_are_the_plain_ones_within_rounding(
    model_type: str,
) -> None:
    model = adapted(model_type)
    num_layers = len(LayeredModel(model).layers)
    plain_loss, plain = streamed(copy.deepcopy(model), micro_batches(), num_slots=2)
    loss, ours = step(model, num_slots=2)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 2, "with a graph to keep and without"
    resident_loss, resident = step(model, num_slots=num_layers)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert rel_error(ours, plain) < 2e-6


@pytest.mark.exhaustive
def test_a_compiled_recomputation_drops_out_what_its_forward_did() -> None:
    model = adapted("qwen3", dropout=0.5)
    num_layers = len(LayeredModel(model).layers)
    loss, again = step(model, num_slots=2)
    kept_loss, kept = step(model, num_slots=num_layers, kept_graphs=num_layers)
    assert loss == pytest.approx(kept_loss, rel=1e-6)
    assert rel_error(again, kept) < 2e-6
    _, without = step(adapted("qwen3"), num_slots=2)
    assert rel_error(again, without) > 0.1, "dropout has an effect"


def test_layers_that_compile_again_and_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_FORMS", 1)
    model = adapted("qwen3")
    with pytest.raises(FAILURES) as caught:
        step(model, num_slots=2)
    error = refusal(caught.value)
    assert "torch could not compile the layers: FailOnRecompileLimitHit" in error.what
    assert error.hint == "`train.compile: false`"


def test_compiled_layers_compute_the_reference_of_an_objective() -> None:
    model = adapted("qwen3")
    _, truth = plain_step(model, pairs(3), in_order)
    found = []
    for num_slots in (2, 4):
        compiled = copy.deepcopy(model)
        layers = LayeredModel(compiled).layers
        compile_layers(layers)
        engine = offload.attach(compiled, num_slots=min(num_slots, len(layers)), device="cpu")
        objective = ByRow(in_order, num_trained=6)
        engine.forward_backward(pairs(1, 2), objective=objective, dropout_seed=0)
        found.append(gradients(compiled))
        engine.detach()
    assert rel_error(found[0], truth) < 3e-6
    assert all(torch.equal(found[0][name], found[1][name]) for name in truth)
