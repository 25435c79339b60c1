"""Hooks of gradients on an attached model: run as in the plain model, or refused."""

from typing import Any

import pytest
import torch

import offload
from tests.parity.attached import attached
from tests.parity.steps import MODELS, gradients, micro_batches, tiny
from tests.parity.tiny_models import tiny_model
from tests.tiers import diagonal

pytestmark = pytest.mark.usefixtures("one_thread")


def trained_whole(*, is_tied: bool) -> Any:
    """Return a model whose embedding, head and one layer train."""
    model: Any = tiny_model("qwen3", tie_word_embeddings=is_tied)
    model.requires_grad_(False)
    for module in (
        model.model.embed_tokens,
        model.lm_head,
        model.model.norm,
        model.model.layers[1],
    ):
        module.requires_grad_(True)
    return model


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


HINT_AFTER = r".*hint: apply it to `.grad` after `forward_backward` returns"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "is_tied"),
    diagonal(["model.embed_tokens.weight", "model.norm.weight"], [True, False]),
)
def test_a_hook_on_a_gradient_outside_the_layers_is_refused(name: str, is_tied: bool) -> None:
    model = trained_whole(is_tied=is_tied)
    with attached(model) as engine:
        handle = model.get_parameter(name).register_hook(halved)
        what = f"{name} has a hook of `register_hook` and is not in exactly one layer"
        with pytest.raises(offload.OffloadError, match=f"(?s){what}{HINT_AFTER}"):
            engine.forward_backward(micro_batches())
        assert all(p.grad is None for p in model.parameters())
        handle.remove()
        engine.forward_backward(micro_batches())


def test_a_hook_on_a_gradient_that_two_layers_share_is_refused() -> None:
    model = trained_whole(is_tied=False)
    norm = model.model.layers[1].input_layernorm.weight
    model.model.layers[2].input_layernorm.weight = norm
    with attached(model) as engine:
        norm.register_hook(halved)
        with pytest.raises(offload.OffloadError, match=f"(?s)layernorm.* in exactly{HINT_AFTER}"):
            engine.forward_backward(micro_batches())


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_hook_on_an_accumulated_gradient_is_refused(where: str) -> None:
    model = trained_whole(is_tied=False)
    with attached(model) as engine:
        model.get_parameter(where).register_post_accumulate_grad_hook(lambda p: None)
        what = f"{where} has a hook of `register_post_accumulate_grad_hook`"
        with pytest.raises(offload.OffloadError, match=f"(?s){what}{HINT_AFTER}"):
            engine.forward_backward(micro_batches())
        assert all(p.grad is None for p in model.parameters())


def test_a_hook_that_says_that_it_takes_parts_of_gradients_is_run() -> None:
    class Counts:
        takes_partial_gradients = True
        num_calls = 0

        def __call__(self, parameter: torch.Tensor) -> None:
            self.num_calls += 1

    model, counts = trained_whole(is_tied=True), Counts()
    with attached(model) as engine:
        model.lm_head.weight.register_post_accumulate_grad_hook(counts)
        engine.forward_backward(micro_batches())
    assert counts.num_calls > len(micro_batches())


def test_a_hook_on_a_master_is_refused_for_it_would_not_run() -> None:
    model: Any = MODELS["qwen3"]().train()
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    name = "model.layers.1.mlp.up_proj.weight"
    handle = engine.trained_parameters[name].register_hook(halved)
    with pytest.raises(offload.OffloadError, match=f"(?s){name}, as .* a hook;{HINT_AFTER}"):
        engine.forward_backward(micro_batches())
    assert all(p.grad is None for p in engine.trained_parameters.values())
    handle.remove()
    engine.forward_backward(micro_batches())
    engine.detach()


@pytest.mark.thorough
def test_a_hook_on_a_gradient_inside_a_layer_runs_as_in_the_plain_model() -> None:
    """The sum of what it made of each micro-batch: `plain` runs a copy, which has no hooks."""
    model = tiny("qwen3")
    batches = micro_batches()
    num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for parameter in (p for n, p in model.named_parameters() if "layers.1." in n):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=torch.tensor(num_labels)).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    with attached(model) as engine:
        engine.forward_backward(micro_batches())
        found = gradients(model)
    assert max(g.abs().max() for n, g in expected.items() if "layers.1." in n) <= 3.001e-3
    assert max(g.abs().max() for n, g in expected.items() if "layers.2." in n) > 4e-3
    assert all(torch.allclose(found[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())
