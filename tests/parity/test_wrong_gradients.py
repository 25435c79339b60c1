"""Ways in which layer by layer gives the right loss and wrong gradients: each exact, or refused.

"Exact" here is against plain transformers, peft and autograd on the same model and micro-batches.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from transformers import (
    Gemma4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import offload
from tests.parity.architectures import gradients, micro_batches, streamed
from tests.parity.exactness import adapted, assert_exact, llama
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_refused(model: nn.Module, match: str) -> None:
    """Check that a step is refused before any gradient is touched."""

    def attach_and_step() -> None:
        engine = offload.attach(model, num_slots=2, device="cpu")
        try:
            engine.forward_backward(micro_batches())
        finally:
            engine.detach()

    with pytest.raises(offload.UnsupportedModelError, match=match):
        attach_and_step()
    assert all(parameter.grad is None for parameter in model.parameters())


# -------------------------------------------------------------------------------- left switched on


@pytest.mark.thorough
def test_a_cache_left_on_in_the_config_changes_no_gradient() -> None:
    assert_exact(llama(use_cache=True))


@pytest.mark.thorough
def test_a_cache_left_on_for_generation_changes_no_gradient() -> None:
    base = tiny_model("llama")
    assert base.generation_config is not None
    base.generation_config.use_cache = True
    assert_exact(adapted(base))


@pytest.mark.thorough
def test_checkpointing_left_on_changes_no_gradient_and_is_on_again_after_detach() -> None:
    model: Any = llama()
    expected = assert_exact(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is about to be renamed
        model.get_base_model().gradient_checkpointing_enable()
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    assert not model.get_base_model().is_gradient_checkpointing
    engine.forward_backward(micro_batches(), dropout_seed=0)
    found = gradients(model)
    engine.detach()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.get_base_model().is_gradient_checkpointing


@pytest.mark.thorough
def test_hidden_states_that_a_config_asks_for_are_not_collected_and_come_back_after_detach() -> (
    None
):
    model: Any = llama(output_hidden_states=True)
    assert_exact(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    engine.detach()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[3, 4, 5]]))
    assert len(output.hidden_states) == 5


# -------------------------------------------------------------------------- trained outside layers


@pytest.mark.parametrize("is_tied", mostly_slow([True, False], True))
def test_trained_embeddings_and_head_get_their_gradients_tied_or_not(is_tied: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=is_tied,
    )
    model = adapted(LlamaForCausalLM(config).requires_grad_(False))
    base: Any = model
    base.get_base_model().get_input_embeddings().weight.requires_grad_(True)
    base.get_base_model().get_output_embeddings().weight.requires_grad_(True)
    found = assert_exact(model)
    assert any("embed_tokens" in name for name in found)
    assert any("lm_head" in name for name in found) is not is_tied


@pytest.mark.thorough
def test_a_head_saved_with_the_adapter_gets_its_gradient() -> None:
    base = tiny_model("llama")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    found = assert_exact(get_peft_model(base, config).train())
    assert any("lm_head" in name for name in found)
    assert any("embed_tokens" in name for name in found)


def test_a_soft_prompt_is_refused_because_it_is_not_in_the_model() -> None:
    base = tiny_model("llama")
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    assert_refused(get_peft_model(base, config), "prompt_encoder.* trains, but is no part of Llama")


# ------------------------------------------------------------------------- arguments of the layers


def gemma4(**changes: Any) -> Gemma4ForCausalLM:
    base = tiny_model("gemma4_text", **changes)
    assert isinstance(base, Gemma4ForCausalLM)
    return base


def test_trained_per_layer_embeddings_get_the_gradients_of_all_layers() -> None:
    model: Any = adapted(gemma4())
    trained = model.get_base_model().model
    for module in (trained.embed_tokens_per_layer, trained.per_layer_model_projection):
        module.weight.requires_grad_(True)
    found = assert_exact(model)
    assert sum("per_layer" in name for name in found) >= 2
    assert all(float(t.norm()) > 0 for name, t in found.items() if "tokens_per_layer" in name)


def test_shared_keys_and_values_are_refused_by_their_setting() -> None:
    base = gemma4()
    base.config.num_kv_shared_layers = 2
    assert_refused(base, "config.num_kv_shared_layers is 2; layers that read another layer's keys")


def test_shared_keys_and_values_are_refused_by_what_a_layer_writes() -> None:
    """As if their setting had another name."""
    base: Any = gemma4()
    base.model.layers[1].self_attn.store_full_length_kv = True
    base.model.layers[3].self_attn.is_kv_shared_layer = True
    assert_refused(adapted(base), "Gemma4ForCausalLM has a layer 1 that changes its arguments")


@pytest.mark.thorough
def test_keys_and_values_that_a_layer_stores_and_none_reads_are_not_stored() -> None:
    """As some versions of transformers have it where no layers share them."""
    base: Any = gemma4()
    base.model.layers[1].self_attn.store_full_length_kv = True
    assert_exact(adapted(base))
    assert base.model.layers[1].self_attn.store_full_length_kv


def test_a_container_that_a_layer_writes_to_is_refused() -> None:
    base: Any = gemma4()

    def write(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["shared_kv_states"]["written"] = torch.zeros(1)

    base.model.layers[2].register_forward_pre_hook(write, with_kwargs=True)
    assert_refused(adapted(base), "Gemma4ForCausalLM has a layer 2 that changes its arguments")


class Wrapped(nn.Module):
    """A layer with something done before or after it, in its own module."""

    def __init__(self, layer: nn.Module, change: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self.change = change
        self.register_buffer("calls", torch.zeros(1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return self.change(self, hidden, kwargs)


def with_changed_layer(change: Callable[..., Any]) -> nn.Module:
    model: Any = llama()
    layers = model.get_base_model().model.layers
    layers[2] = Wrapped(layers[2], change)
    return model


def write_to_input(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        hidden.mul_(2)
    return own.layer(hidden, **kwargs)


def write_to_argument(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    kwargs["position_embeddings"][0].mul_(2)
    return own.layer(hidden, **kwargs)


def count_in_buffer(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    own.get_buffer("calls").add_(1)
    return own.layer(hidden, **kwargs)


def replace_buffer(own: Wrapped, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    own.calls = own.get_buffer("calls") + 1
    return own.layer(hidden, **kwargs)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (write_to_input, "its input"),
        (write_to_argument, "its arguments"),
        (count_in_buffer, "its buffers"),
        (replace_buffer, "its buffers"),
    ],
)
def test_a_layer_that_writes_what_others_or_its_recompute_read_is_refused(
    change: Callable[..., Any], what: str
) -> None:
    assert_refused(
        with_changed_layer(change), f"LlamaForCausalLM has a layer 2 that changes {what}"
    )


@pytest.mark.thorough
def test_a_container_that_no_layer_changes_may_be_passed() -> None:
    assert_exact(adapted(gemma4()))


# ------------------------------------------------------------------------------- around the layers


def test_a_model_that_drops_layers_at_random_is_refused() -> None:
    base: Any = tiny_model("bart")
    model = adapted(base)
    base.model.decoder.layerdrop = 1.0
    assert_refused(model, r"skips layers at random in training: `model.decoder.layerdrop` is 1.0")


def test_a_model_that_computes_between_its_layers_is_refused() -> None:
    base: Any = tiny_model("llama")
    original = base.model.layers.__class__.__getitem__
    assert original is nn.ModuleList.__getitem__
    forward = base.model.forward

    class Adding(nn.ModuleList):
        def __getitem__(self, index: Any) -> Any:
            layers = super().__getitem__(index)
            return [lambda h, layer=layer, **kw: layer(h, **kw) + 1 for layer in layers]

    def changed_forward(**kwargs: Any) -> Any:
        base.model._modules["layers"].__class__ = Adding
        return forward(**kwargs)

    model = adapted(base)
    base.model.forward = changed_forward
    assert_refused(model, "computes with the hidden state between its layers")


def test_a_tail_that_reads_other_tokens_is_refused() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    base.model.norm.register_forward_hook(lambda _m, _i, out: out + out.mean(dim=1, keepdim=True))
    base.lm_head.register_forward_hook(lambda _m, _i, out: out.cumsum(dim=1))
    assert_refused(model, "does not compute a token's logits from the last layer's output for it")


@pytest.mark.thorough
def test_a_head_that_forbids_part_of_the_vocabulary_is_exact() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    base.lm_head.register_forward_hook(
        lambda _m, _i, out: out.masked_fill(torch.arange(64) < 2, -torch.inf)
    )
    assert_exact(model)


@pytest.mark.thorough
def test_weights_that_are_no_numbers_show_in_the_loss() -> None:
    base: Any = tiny_model("llama")
    base.lm_head.weight[5] = torch.nan
    loss, _ = streamed(adapted(base), micro_batches(), num_slots=2)
    assert math.isnan(loss)


def test_a_tail_that_reads_the_embeddings_is_refused() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    seen: list[torch.Tensor] = []
    base.model.embed_tokens.register_forward_hook(lambda _m, _i, out: seen.append(out))
    base.model.norm.register_forward_hook(lambda _m, _i, out: out + seen[-1])
    assert_refused(model, "does not compute a token's logits from the last layer's output for it")
