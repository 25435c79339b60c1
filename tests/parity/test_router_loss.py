"""The router's auxiliary loss, over all layers at once, is that of the plain model."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import offload
from finetune.model.load import set_router_loss
from offload.engine.batch import Batch
from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import (
    SLACK,
    Gradients,
    causal_types,
    micro_batches,
    rel_error,
    streamed,
)
from tests.parity.router_loss import plain
from tests.parity.tiny_models import balanced, tiny_model, with_adapters
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
COMMON = ("gpt_oss", "qwen3_moe")
OTHERS = (
    "dbrx",
    "deepseek_v4",
    "ernie4_5_moe",
    "flex_olmo",
    "flint",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "jamba",
    "laguna",
    "mellum",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
)


def truth(model: nn.Module, batches: Sequence[Batch]) -> Gradients:
    model = copy.deepcopy(model).double()
    config: Any = model.config
    config._experts_implementation = "eager"
    return plain(model, batches)[1]


def check(model_type: str) -> None:
    """Compare to the bit with the resident step, and with the plain model over several models."""
    batches = micro_batches()
    ours_squared = plain_squared = 0.0
    for seed in range(4):
        model = balanced(model_type, seed=seed)
        loss, ours = streamed(model, batches, num_slots=2)
        resident_loss, resident = streamed(model, batches, num_slots=8)
        assert loss == resident_loss
        assert all(torch.equal(ours[name], resident[name]) for name in ours)
        plain_loss, reference = plain(model, batches)
        assert loss == pytest.approx(plain_loss, rel=1e-6)
        assert rel_error(ours, reference) < 2e-6
        true = truth(model, batches)
        ours_squared += rel_error(ours, true) ** 2
        plain_squared += rel_error(reference, true) ** 2
    assert ours_squared <= SLACK**2 * plain_squared


@pytest.mark.slow
@pytest.mark.parametrize("model_type", COMMON)
def test_reorder_a_router_loss_is_that_of_the_plain_model(model_type: str) -> None:
    check(model_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", [name for name in OTHERS if name in causal_types()])
def test_reorder_a_router_loss_is_that_of_the_plain_model_in_other_types(model_type: str) -> None:
    check(model_type)


def test_the_router_loss_is_in_the_loss_and_in_the_gradients() -> None:
    batches = micro_batches()
    small, large = balanced("mixtral", coefficient=0.0), balanced("mixtral", coefficient=0.5)
    without, with_loss = (
        streamed(small, batches, num_slots=2),
        streamed(large, batches, num_slots=2),
    )
    assert with_loss[0] > without[0] + 0.4
    assert rel_error(with_loss[1], without[1]) > 1e-3


@pytest.mark.parametrize("model_type", mostly_slow(COMMON, "qwen3_moe"))
def test_reorder_a_coefficient_that_is_set_later_is_that_of_transformers_own(
    model_type: str,
) -> None:
    asked: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    silent: Any = tiny_model(model_type, output_router_logits=False, router_aux_loss_coef=0.001)
    with_loss: Any = tiny_model(model_type, **asked)
    set_router_loss(silent, 0.25)
    models = [with_adapters(m, LayeredModel(m).layers) for m in (silent, with_loss)]
    loss, ours = streamed(models[0], micro_batches(), num_slots=2)
    plain_loss, reference = plain(models[1], micro_batches())
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, reference) < 2e-6


def test_a_coefficient_of_zero_leaves_out_what_the_config_asks_for() -> None:
    silent: Any = tiny_model("mixtral", output_router_logits=False)
    asking: Any = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    set_router_loss(asking, 0.0)
    models = [with_adapters(m, LayeredModel(m).layers) for m in (silent, asking)]
    losses = [streamed(model, micro_batches(), num_slots=2)[0] for model in models]
    assert losses[0] == losses[1]


def test_micro_batches_without_a_mask_are_counted_whole() -> None:
    batches = [{k: v for k, v in b.items() if k != "attention_mask"} for b in micro_batches()]
    model = balanced("mixtral")
    loss, ours = streamed(model, batches, num_slots=2)
    plain_loss, reference = plain(model, batches)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, reference) < 2e-6


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    batches = micro_batches()
    empty = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}
    model = balanced("mixtral")
    loss, ours = streamed(model, [*batches, empty], num_slots=2)
    expected_loss, expected = streamed(model, batches, num_slots=2)
    assert loss == expected_loss
    assert rel_error(ours, expected) < 1e-7


def test_an_evaluation_has_no_router_loss() -> None:
    batch = micro_batches()[0]
    losses = []
    for coefficient in (0.0, 0.5):
        engine = offload.attach(
            balanced("mixtral", coefficient=coefficient), num_slots=2, device="cpu"
        )
        losses.append(engine.forward(batch).loss_sum)
        engine.detach()
    assert losses[0] == losses[1]


def test_the_setting_is_on_again_after_a_step_and_no_hook_is_left() -> None:
    model: Any = balanced("mixtral")
    num_hooks = sum(len(module._forward_hooks) for module in model.modules())
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    engine.detach()
    assert model.config.output_router_logits is True
    assert sum(len(module._forward_hooks) for module in model.modules()) == num_hooks


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM has no `load_balancing_loss_func` beside it"),
        ("doge", "DogeForCausalLM has a `load_balancing_loss_func` that takes other arguments"),
        ("jetmoe", "JetMoeForCausalLM has no `router_aux_loss_coef`"),
    ],
)
def test_a_router_loss_of_another_kind_is_refused(model_type: str, what: str) -> None:
    base = tiny_model(model_type, output_router_logits=True)
    with pytest.raises(offload.UnsupportedModelError, match=f"the router loss is on, and {what}"):
        offload.attach(base, num_slots=2, device="cpu")
