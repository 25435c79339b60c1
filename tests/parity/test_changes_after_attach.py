"""A model that changes after it was attached is refused before any gradient is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

import offload
from tests.parity.attached import attached, layer, two_adapters, up_proj
from tests.parity.steps import gradients, micro_batches, plain
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


def frozen_zeros() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 32), requires_grad=False)


def freeze(model: Any) -> None:
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "set_adapter": (lambda m: m.set_adapter("b"), r"lora_A.default.weight was frozen since"),
    "unfreeze a streamed weight": (
        lambda m: up_proj(m).weight.requires_grad_(True),
        r"up_proj.weight was unfrozen since",
    ),
    "unfreeze a streamed weight by its attribute": (
        lambda m: setattr(up_proj(m).weight, "requires_grad", True),
        r"up_proj.weight was unfrozen since",
    ),
    "unfreeze the embedding": (
        lambda m: m.get_input_embeddings().weight.requires_grad_(True),
        r"embed_tokens.weight was unfrozen since",
    ),
    "freeze": (freeze, r"lora_A.default.weight was frozen since"),
    "freeze all": (lambda m: m.requires_grad_(False), r"was frozen since .* more\);"),
    "add an adapter": (
        lambda m: m.add_adapter("c", LoraConfig(target_modules=["q_proj"])),
        r"lora_dropout.c was added since",
    ),
    "delete an adapter": (lambda m: m.delete_adapter("b"), r"lora_dropout.b was removed since"),
    "replace a parameter": (
        lambda m: setattr(up_proj(m), "weight", nn.Parameter(torch.zeros(64, 32))),
        r"up_proj.weight was replaced since",
    ),
    "replace a module": (
        lambda m: setattr(layer(m).mlp, "up_proj", nn.Linear(32, 64, bias=False)),
        r"up_proj was replaced since",
    ),
    "assign weights to a layer": (
        lambda m: layer(m).load_state_dict(layer(two_adapters()).state_dict(), assign=True),
        r"was replaced since",
    ),
    "another type": (
        lambda m: m.get_input_embeddings().double(),
        r"embed_tokens.weight became torch.float64 on cpu from torch.float32 on cpu since",
    ),
    "swap tensors": (
        lambda m: torch.utils.swap_tensors(up_proj(m).weight, frozen_zeros()),
        r"up_proj.weight was exchanged with another tensor",
    ),
    "resize": (lambda m: m.resize_token_embeddings(70), r"lm_head was replaced since"),
    "unload": (lambda m: m.unload(), r"was replaced since"),
}


@pytest.mark.filterwarnings("ignore:Already found:UserWarning")
@pytest.mark.parametrize(
    ("change", "what"),
    mostly_slow(CHANGES, "set_adapter", "unfreeze a streamed weight", "another type"),
)
def test_a_change_after_attach_is_refused_before_any_gradient_is_written(
    change: Callable[[Any], object], what: str
) -> None:
    model = two_adapters()
    parameters = list(model.parameters())
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    model.zero_grad()
    change(model)
    for _ in range(2):
        with pytest.raises(offload.OffloadError, match=rf"(?s){what}.*hint: .*`engine.detach"):
            engine.forward_backward(micro_batches())
    engine.detach()
    assert all(p.grad is None for p in (*parameters, *model.parameters()))


@pytest.mark.thorough
@pytest.mark.parametrize("is_on", [True, False])
def test_a_router_loss_that_is_switched_after_attach_is_refused(is_on: bool) -> None:
    model: Any = tiny_model("qwen3_moe", output_router_logits=not is_on)
    model.model.layers[0].requires_grad_(False)
    engine = offload.attach(model, num_slots=2, device="cpu")
    model.config.output_router_logits = is_on
    what = rf"`config.output_router_logits` became {is_on} since .*hint: .*`engine.detach"
    with pytest.raises(offload.OffloadError, match=rf"(?s){what}"):
        engine.forward_backward(micro_batches())
    assert all(p.grad is None for p in model.parameters())
    model.config.output_router_logits = not is_on
    assert engine.forward_backward(micro_batches()).loss > 0
    engine.detach()


@pytest.mark.thorough
def test_what_trains_is_not_listed_from_a_model_that_has_changed() -> None:
    model = two_adapters()
    with attached(model) as engine:
        model.set_adapter("b")
        with pytest.raises(offload.OffloadError, match="was frozen since"):
            _ = engine.trained_parameters
        model.set_adapter("default")
        assert all(".default." in name for name in engine.trained_parameters)


@pytest.mark.thorough
def test_a_change_that_is_undone_or_attached_anew_trains_like_the_plain_model() -> None:
    model = two_adapters()
    with attached(model) as engine:
        model.set_adapter("b")
        model.set_adapter("default")
        found = engine.forward_backward(micro_batches()).loss
    assert found == pytest.approx(plain(model)[0], rel=1e-5)
    model.zero_grad()
    model.set_adapter("b")
    loss, expected = plain(model)
    with attached(model) as engine:
        assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
        grads = gradients(model)
    assert all(torch.allclose(grads[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())
