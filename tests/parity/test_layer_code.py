"""What a model's own code does around its layers is computed as it does, or refused."""

import collections
import contextvars
import copy
import itertools
import math
import random
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import offload
from offload.engine.model.layers import LayeredModel
from offload.engine.randomness import _OwnGenerators
from tests.parity.architectures import gradients as all_gradients
from tests.parity.architectures import micro_batches, streamed
from tests.parity.attached import attached
from tests.parity.custom_model import (
    NUM_LAYERS,
    VOCABULARY,
    WIDTH,
    CustomLayer,
    CustomModel,
)
from tests.parity.custom_steps import (
    SHARED,
    assert_equal,
    assert_refused,
    batches,
    built,
    gradients,
    of,
    plain,
)
from tests.parity.exactness import adapted, assert_exact, llama
from tests.parity.steps import MODELS, tiny
from tests.parity.steps import NUM_LAYERS as NUM_TINY_LAYERS
from tests.parity.steps import gradients as given_gradients
from tests.parity.steps import micro_batches as tiny_batches
from tests.parity.tiny_models import tiny_model
from tests.tiers import diagonal, mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


# --------------------------------------------------------------------------------- what layers keep


def _endless() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _by_queue(queue: Any) -> int:
    queue.append(queue.popleft() + 1)
    return int(queue[0])


def _by_namespace(space: Any) -> int:
    space.number += 1
    return int(space.number)


def _by_array(array: Any) -> int:
    array[0] += 1
    return int(array[0])


def _by_variable(variable: Any) -> int:
    variable.set(variable.get() + 1)
    return int(variable.get())


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "namespace": (lambda: types.SimpleNamespace(number=0), _by_namespace),
    "numpy": (lambda: np.zeros(1), _by_array),
    "count": (itertools.count, next),
    "generator": (_endless, next),
    "deque": (lambda: collections.deque([0]), _by_queue),
    "context variable": (lambda: contextvars.ContextVar("number", default=0), _by_variable),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_layer_that_counts_in_any_object_is_refused(name: str) -> None:
    make, count = COUNTERS[name]

    class Counts(CustomLayer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.counter = make()

        def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
            return super().forward(hidden) * (1 + count(self.counter) % 2)

    assert_refused(built(of(Counts)), "has a layer 0 that changes `.*counter.*` when it is called")


class CountsInClass(CustomLayer):
    num_calls = 0

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        type(self).num_calls += 1
        return super().forward(hidden) * (1 + type(self).num_calls % 2)


NUM_CALLS = [0]


def bump() -> int:
    NUM_CALLS[0] += 1
    return NUM_CALLS[0]


class CountsInHelper(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) * (1 + self.number() % 2)

    def number(self) -> int:
        return bump()


@pytest.mark.parametrize(
    ("layer", "what"),
    [(CountsInClass, r"num_calls \(of CountsInClass\)"), (CountsInHelper, "NUM_CALLS .*")],
)
def test_a_layer_that_counts_in_its_class_or_in_a_helper_is_refused(
    layer: type[CustomLayer], what: str
) -> None:
    assert_refused(built(of(layer)), f"has a layer 0 that changes `{what}`")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_layer_that_draws_elsewhere_than_in_torch_is_refused(draw: Callable[[], float]) -> None:
    class Skips(CustomLayer):
        def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
            return hidden if draw() < 0.01 else super().forward(hidden)

    assert_refused(built(of(Skips)), "has a layer 0 that changes `.* random numbers`")


class OwnNoise(CustomLayer):
    """Draws from a generator of its own, before weights that begin at zero."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.generator = torch.Generator().manual_seed(0)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        noise = torch.rand(hidden.shape, generator=self.generator)
        return super().forward(hidden) + self.gain * noise


def test_a_generator_of_a_layers_own_is_refused() -> None:
    assert_refused(built(of(OwnNoise)), "has a layer 0 that changes `generator` when it is called")


class WritesArgument(CustomLayer):
    def forward(self, hidden: torch.Tensor, scale: Any = None, **arguments: Any) -> Any:
        output = super().forward(hidden) * scale
        scale.data.mul_(0.5)
        return output


class PassesScale(CustomModel):
    layer = WritesArgument
    scale: torch.Tensor

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.scale = torch.ones(()) if index == 0 else self.scale
        return layer(hidden, scale=self.scale)


def test_an_argument_that_is_written_to_unseen_is_refused() -> None:
    assert_refused(built(PassesScale), "has a layer 0 that writes to what it is passed")


class ByMode(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) * (1.0 if torch.is_grad_enabled() else 0.9)


def test_a_layer_that_minds_whether_gradients_are_recorded_is_refused() -> None:
    assert_refused(built(of(ByMode)), "has a layer 0 that gives another output for the same input")


class Checkpoints(CustomLayer):
    """Computes again in its backward, with a dropout after another one."""

    is_reentrant = False

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        hidden = nn.functional.dropout(hidden, 0.1)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(CustomLayer.forward(self, x), 0.5)

        return checkpoint(inner, hidden, use_reentrant=type(self).is_reentrant)


class CheckpointsReentrantly(Checkpoints):
    is_reentrant = True


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("layer", [Checkpoints, CheckpointsReentrantly])
def test_a_checkpoint_with_dropout_inside_a_layer_is_refused(layer: type[CustomLayer]) -> None:
    assert_refused(built(of(layer)), "has a layer 0 that draws random numbers")


# -------------------------------------------------------------------------------------------- hooks


class Hook:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return output * (1.0 if self.number % 2 else 0.9)

    def method(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return self(module, inputs, output)


def _with_state(state: dict[str, int], _m: nn.Module, _i: Any, output: torch.Tensor) -> Any:
    state["number"] += 1
    return output * (1.0 if state["number"] % 2 else 0.9)


def _in_place() -> Callable[..., None]:
    numbers = [0]

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        numbers[0] += 1
        output.mul_(1.0 if numbers[0] % 2 else 0.9)

    return hook


def _later() -> Callable[..., Any]:
    numbers = [0]

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> Any:
        numbers[0] += 1
        if numbers[0] > 1000:
            return output * 0.9
        return None

    return hook


HOOKS: dict[str, Callable[[], Any]] = {
    "object": Hook,
    "method": lambda: Hook().method,
    "partial": lambda: partial(_with_state, {"number": 0}),
    "in place": _in_place,
    "later": _later,
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("is_global", [False, True], ids=["of a module", "of all"])
def test_a_hook_that_changes_values_by_what_it_keeps_is_refused(name: str, is_global: bool) -> None:
    model, hook = built(CustomModel), HOOKS[name]()
    mlp = model.get_base_model().model.layers[1].mlp
    handle = (
        nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: hook(module, inputs, output) if module is mlp else None
        )
        if is_global
        else mlp.register_forward_hook(hook)
    )
    try:
        assert_refused(model, "has a layer 1 that changes `.*a hook.*` when it is called")
    finally:
        handle.remove()


def test_hooks_that_record_in_tensors_and_lists_are_exact() -> None:
    model, seen = built(CustomModel), list[torch.Tensor]()
    total = torch.zeros(())
    mlp = model.get_base_model().model.layers[1].mlp
    mlp.register_forward_hook(lambda _m, _i, output: seen.append(output))

    def record(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        total.add_(output.detach().sum())

    mlp.register_forward_hook(record)
    assert_equal(model)
    assert seen
    assert total != 0


# --------------------------------------------------------------------------- around the layers


class SetsAttribute(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        layer.factor = 0.5
        return layer(hidden)


class CallsInAutocast(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(hidden)


class CallsWithoutGradient(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        with torch.no_grad():
            return layer(hidden)


MEANS = types.SimpleNamespace(value=1.0)


class ReadsMean(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) * MEANS.value


class LeavesMean(CustomModel):
    layer = ReadsMean

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            MEANS.value = 1.0 + float(self.tokens[0, 0]) / 100
        return layer(hidden)


class MixesPositive(CustomModel):
    """Mixes tokens after the layers, where random hidden states give no number."""

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        logarithm = hidden.log()
        return logarithm + logarithm.mean(1, keepdim=True)


class Positive(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden).exp().clamp(max=5) + 0.1


MixesPositive.layer = Positive


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (SetsAttribute, "sets `factor` of a layer from outside"),
        (CallsInAutocast, "calls layer 0 in a mode of torch's of its own"),
        (CallsWithoutGradient, "calls layer 0 in a mode of torch's of its own"),
        (LeavesMean, "changes `value .*`, which its layers can read, before its layers"),
        (MixesPositive, "does not compute a token's logits from the last layer's output"),
    ],
)
def test_what_is_done_around_the_layers_is_refused(kind: type[CustomModel], what: str) -> None:
    assert_refused(built(kind), what)


def test_what_is_changed_after_the_first_step_is_inspected_again() -> None:
    model = built(CustomModel)
    _, expected = plain(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(batches(), dropout_seed=0)
    found = gradients(model)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-6) for n in expected)
    model.zero_grad(set_to_none=True)
    norm = model.get_base_model().model.norm
    norm.register_forward_hook(lambda _m, _i, output: output + output.mean(1, keepdim=True))
    with pytest.raises(offload.UnsupportedModelError, match="does not compute a token's logits"):
        engine.forward_backward(batches(), dropout_seed=0)
    engine.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_is_replaced_after_the_first_step_is_inspected_too() -> None:
    model = built(CustomModel)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(batches(), dropout_seed=0)
    model.zero_grad(set_to_none=True)

    def smoothed(logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
        rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(rows, targets, label_smoothing=0.3)

    model.get_base_model().loss_function = smoothed
    with pytest.raises(offload.UnsupportedModelError, match="gives a loss of"):
        engine.forward_backward(batches(), dropout_seed=0)
    engine.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


class MasksAfter(CustomModel):
    """Reads the padding after the layers, where it is given any."""

    kept: Any = None

    def forward(self, input_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        self.kept = more.get("attention_mask")
        return super().forward(input_ids, *rest, **more)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden if self.kept is None else hidden * self.kept[..., None]


def test_a_micro_batch_with_other_inputs_is_inspected_too() -> None:
    model = built(MasksAfter)
    first, second = batches()
    second["attention_mask"] = torch.ones_like(second["input_ids"])
    second["attention_mask"][0, 5:] = 0
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match="does not compute a token's logits"):
        engine.forward_backward([first, second], dropout_seed=0)
    engine.detach()


def test_a_row_is_computed_as_alone_after_a_longer_one_grew_the_table() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    )
    model: Any = Qwen3ForCausalLM(config)
    model.model.layers.requires_grad_(False)
    long = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    short = {"input_ids": long[:, :20], "labels": long[:, :20]}
    loss = model(**short, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    model(input_ids=long)
    engine = offload.attach(model, num_slots=2, device="cpu")
    found_loss = engine.forward_backward([short], dropout_seed=0).loss
    engine.detach()
    assert found_loss == pytest.approx(loss.item(), rel=1e-5)
    found = gradients(model)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-3, atol=1e-6) for n in expected)


def test_a_model_that_was_compiled_is_exact() -> None:
    model = built(CustomModel)
    loss, expected = plain(model)
    model.get_base_model().compile(backend="eager")
    engine = offload.attach(model, num_slots=2, device="cpu")
    assert engine.forward_backward(batches(), dropout_seed=0).loss == pytest.approx(loss, rel=1e-5)
    engine.detach()
    found = gradients(model)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-6) for n in expected)


# ---------------------------------------------------------------------------------- wrong gradients


def assert_refused_wrong_gradients(model: nn.Module, match: str) -> None:
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
    found = all_gradients(model)
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
    assert_refused_wrong_gradients(
        get_peft_model(base, config), "prompt_encoder.* trains, but is no part of Llama"
    )


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

    base.model.layers[0].register_forward_pre_hook(write, with_kwargs=True)
    assert_refused_wrong_gradients(
        adapted(base), "Gemma4ForCausalLM has a layer 0 that changes its arguments"
    )


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
    assert_refused_wrong_gradients(
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
    assert_refused_wrong_gradients(
        model, r"skips layers at random in training: `model.decoder.layerdrop` is 1.0"
    )


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
    assert_refused_wrong_gradients(model, "computes with the hidden state between its layers")


def test_a_tail_that_reads_other_tokens_is_refused() -> None:
    base: Any = tiny_model("llama")
    model = adapted(base)
    base.model.norm.register_forward_hook(lambda _m, _i, out: out + out.mean(dim=1, keepdim=True))
    base.lm_head.register_forward_hook(lambda _m, _i, out: out.cumsum(dim=1))
    assert_refused_wrong_gradients(
        model, "does not compute a token's logits from the last layer's output for it"
    )


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
    assert_refused_wrong_gradients(
        model, "does not compute a token's logits from the last layer's output for it"
    )


# --------------------------------------------------------------------------------------- inspection


# ------------------------------------------------------------------------------------- reference


def test_a_model_of_custom_code_is_exact() -> None:
    assert_equal(built(CustomModel))


# ---------------------------------------------------------------------------- what layers return


class Pair(CustomLayer):
    """Returns a second value, as mixtures do."""

    def forward(self, hidden: torch.Tensor, second: Any = None, **arguments: Any) -> Any:
        values = self.v_proj(hidden) if second is None else self.v_proj(hidden) + second
        return hidden + torch.tanh(self.mlp(self.attend(hidden) + values)), values


class AddsToLoss(CustomModel):
    layer = Pair
    total: Any

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        output = layer(hidden)
        if isinstance(output, tuple):
            hidden, second = output
            self.total = (0.0 if index == 0 else self.total) + second.square().mean()
            return hidden
        return output

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return 0.1 * self.total


class HandsOn(CustomModel):
    layer = Pair
    second: Any

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        output = layer(hidden, second=None if index == 0 else self.second)
        if isinstance(output, tuple):
            hidden, self.second = output
            return hidden
        self.second = None
        return output


class Ignores(CustomModel):
    layer = Pair


def test_a_second_value_that_the_loss_reads_is_refused() -> None:
    assert_refused(built(AddsToLoss), "computes with what a layer returns besides the hidden state")


def test_a_second_value_that_the_next_layer_reads_is_refused() -> None:
    assert_refused(built(HandsOn), "hands more than a hidden state on to layer 1")


def test_a_second_value_that_nothing_reads_is_exact() -> None:
    assert_equal(built(Ignores))


# -------------------------------------------------------------------------- between the layers


class Scaled(CustomLayer):
    """Multiplies by what it is passed."""

    def forward(self, hidden: torch.Tensor, scale: Any = None, **arguments: Any) -> Any:
        scale = scale["by"] if isinstance(scale, dict) else scale
        return hidden + scale * torch.tanh(self.mlp(self.attend(hidden)))


class ChangesDict(CustomModel):
    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.context = {"by": 1.0}
        self.context["by"] = 1.0 + index / 4
        return layer(hidden, scale=self.context)


class ChangesDictAndBack(CustomModel):
    """One dict for all layers, with another value while one of them is called."""

    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.context = {"by": 1.0}
        self.context["by"] = 3.0 if index == 1 else 1.0
        output: torch.Tensor = layer(hidden, scale=self.context)
        self.context["by"] = 1.0
        return output


class RefillsDict(CustomModel):
    """One dict for all layers, refilled for two in the middle."""

    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.context: dict[str, float] = {}
        self.context.clear()
        self.context["by"] = 2.0 if index in (1, 2) else 1.0
        return layer(hidden, scale=self.context)


class ChangesTensor(CustomModel):
    layer = Scaled
    factor: torch.Tensor

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.factor = torch.ones(()) if index == 0 else self.factor.mul_(0.7)
        return layer(hidden, scale=self.factor)


class OneDictEach(CustomModel):
    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden, scale={"by": 1.0 + index / 4})


class Lists(CustomLayer):
    def forward(self, hidden: torch.Tensor, said: Any = None, **arguments: Any) -> Any:
        said.append(self.q_proj(hidden))
        return super().forward(hidden)


class ReadsList(CustomModel):
    layer = Lists

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.said: list[torch.Tensor] = []
        return layer(hidden, said=self.said)

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return sum(said.square().mean() for said in self.said)


class PassesLabels(CustomModel):
    """Passes its labels to its layers, which do not read them."""

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden, labels=self.labels)


class ReadsLabels(CustomLayer):
    def forward(self, hidden: torch.Tensor, labels: Any = None, **arguments: Any) -> Any:
        output = super().forward(hidden)
        return output if labels is None else output + 0.1 * (labels > 0).unsqueeze(-1)


class Drops(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.dropout(layer(hidden), 0.1)


class Detaches(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden).detach() if index == 1 else layer(hidden)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [(ChangesDict, 0), (ChangesTensor, 0), (ChangesDictAndBack, 1), (RefillsDict, 1)],
)
def test_what_is_changed_in_place_between_layers_is_refused(
    kind: type[CustomModel], layer: int
) -> None:
    what = f"changes what it has passed to layer {layer} before it calls another"
    assert_refused(built(kind), what)


def test_another_container_for_each_layer_is_exact() -> None:
    assert_equal(built(OneDictEach))


def test_a_list_that_layers_append_to_is_refused() -> None:
    assert_refused(built(ReadsList), "has a layer 0 that changes its arguments")


def test_labels_that_layers_are_passed_and_do_not_read_are_exact() -> None:
    assert_equal(built(PassesLabels))


def test_labels_that_a_layer_reads_are_refused() -> None:
    kind = type("Mine", (PassesLabels,), {"layer": ReadsLabels})
    assert_refused(built(kind), "computes with its labels in a layer")


@pytest.mark.parametrize("kind", [Drops, Detaches])
def test_what_is_computed_between_layers_is_refused(kind: type[CustomModel]) -> None:
    assert_refused(built(kind), "computes with the hidden state between its layers")


# ------------------------------------------------------------------------- state of the layers


class Globally(CustomLayer):
    """Even layers leave their values, odd layers read those of the layer before."""

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        values = self.v_proj(hidden)
        if self.index % 2 == 0:
            SHARED["values"] = values
        return super().forward(hidden) + 0.1 * SHARED["values"]


class LeavesNumber(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        scale = SHARED.get("mean", 1.0) if self.index else 1.0
        SHARED["mean"] = hidden.detach().square().mean().item()
        return super().forward(hidden) * scale


class Counts(CustomLayer):
    num_calls = 0

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        self.num_calls += 1
        return super().forward(hidden) * (1.0 if self.num_calls < 100 else 0.5)


class CountsInTraining(Counts):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) if self.training else CustomLayer.forward(self, hidden)


class Remembers(CustomLayer):
    state: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        old = torch.zeros(WIDTH) if self.state is None else self.state
        self.state = 0.9 * old + 0.1 * hidden.detach().mean((0, 1))
        return super().forward(hidden) + self.state


class Averages(CustomLayer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        self.mean.data.mul_(0.9).add_(0.1 * hidden.detach().mean((0, 1)))
        return super().forward(hidden) + self.mean


class ReadsOther(CustomLayer):
    """Reads weights of another layer, in a way that no list of modules shows."""

    others: tuple[CustomLayer, ...] = ()

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        other = self.others[(self.index + 2) % NUM_LAYERS]
        return super().forward(hidden) + 0.1 * other.mlp(hidden)


class Logs(CustomLayer):
    """Keeps what nothing reads, and a table that is computed once."""

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        if "table" not in SHARED:
            SHARED["table"] = torch.linspace(0.5, 1.5, WIDTH)
        self.last_attention = self.attend(hidden).detach()
        return super().forward(hidden) * SHARED["table"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Globally, "has a layer 1 that reads a tensor that layer 0 made"),
        (LeavesNumber, r"has a layer 0 that changes `SHARED \(in forward\)\['mean'\]`"),
        (Counts, "has a layer 0 that changes `num_calls` when it is called"),
        (CountsInTraining, "has a layer 0 that changes `num_calls` when it is called"),
        (Remembers, "has a layer 0 that reads a tensor that an earlier call of layer 0 made"),
        (Averages, "has a layer 0 that writes to a tensor that it did not make"),
    ],
)
def test_a_layer_with_state_is_refused(layer: type[CustomLayer], what: str) -> None:
    assert_refused(built(of(layer)), what)


def test_state_in_training_only_does_not_forbid_an_evaluation_before() -> None:
    model = built(of(CountsInTraining)).eval()
    batch = batches()[1]
    with torch.no_grad():
        expected = model(**batch).loss.item()
    engine = offload.attach(model, num_slots=2, device="cpu")
    found = engine.forward(batch)
    model.train()
    with pytest.raises(offload.UnsupportedModelError, match="changes `num_calls`"):
        engine.forward_backward(batches())
    engine.detach()
    assert found.loss_sum / found.num_label_tokens == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_counts_in_a_closure_is_refused() -> None:
    model = built(CustomModel)
    num_calls = 0

    def count(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return output if num_calls < 100 else output * 0.5

    model.get_base_model().model.layers[2].register_forward_hook(count)
    assert_refused(model, r"has a layer 2 that changes `num_calls \(in a hook\)`")


def test_a_hook_that_only_records_is_exact() -> None:
    model = built(CustomModel)
    seen: list[torch.Tensor] = []

    def record(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if len(seen) < 100:
            seen.append(output.detach())

    model.get_base_model().model.layers[2].register_forward_hook(record)
    assert_equal(model)
    assert seen


def test_a_layer_that_reads_weights_of_another_is_refused() -> None:
    model = built(of(ReadsOther))
    layers = tuple(model.get_base_model().model.layers)
    for layer in layers:
        vars(layer)["others"] = layers
    assert_refused(model, "has a layer 0 that reads weights of layer 2")


def test_what_layers_only_log_and_tables_that_they_share_are_exact() -> None:
    assert_equal(built(of(Logs)))


def test_a_hook_that_changes_what_a_layer_returns_is_exact() -> None:
    model = built(CustomModel)
    model.get_base_model().model.layers[1].register_forward_hook(lambda _m, _i, out: out * 1.5)
    assert_equal(model)


def test_weights_that_layers_share_are_exact() -> None:
    model = built(CustomModel)
    layers = model.get_base_model().model.layers
    layers[2].mlp = layers[0].mlp
    layers[3].mlp.weight = layers[1].mlp.weight
    assert_equal(model)


# ------------------------------------------------------------------ modules with several places


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["norm", "embed_tokens"])
def test_a_module_of_a_layer_and_of_the_model_is_not_streamed(name: str) -> None:
    model = built(CustomModel)
    body = model.get_base_model().model
    for layer in body.layers:
        layer.borrowed = getattr(body, name)
    assert_equal(model)


def test_a_module_of_a_layer_that_the_tail_reads_in_secret_is_refused() -> None:
    class Secret(CustomModel):
        def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return vars(self)["secret"](hidden) if "secret" in vars(self) else hidden

    model = built(Secret)
    base = model.get_base_model()
    vars(base)["secret"] = base.model.layers[1].mlp
    assert_refused(model, "reads weights of layer 1")


# ---------------------------------------------------------------------------------- tail inspection


# ------------------------------------------------------------------------------- after the layers


class Skips(CustomModel):
    """Adds the embeddings, through a gate and a matrix that are zero."""

    def prepare(self) -> None:
        self.skip = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(1, 1, bias=False)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden + self.gate.weight * self.skip(embedded)


class Convolves(CustomModel):
    def prepare(self) -> None:
        self.skip = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(hidden.transpose(1, 2), (2, 0))
        return hidden + self.skip(padded).transpose(1, 2)


class CapsAll(CustomModel):
    """Caps by what all tokens have, where that is large."""

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / (logits.abs().amax() / 1e4).clamp(min=1)


class CapsEach(CustomModel):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return 5 * torch.tanh(logits / 5)


class ByLength(CustomModel):
    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return (hidden - hidden.mean(-1, keepdim=True)) * hidden.shape[1] + hidden

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / math.sqrt(logits.shape[1])


class BiasedByPlace(CustomModel):
    def prepare(self) -> None:
        self.skip = nn.Embedding(16, VOCABULARY)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.skip(torch.arange(logits.shape[1]))


class DetachesAfter(CustomModel):
    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden.detach()


class ScalesGradient(CustomModel):
    """Has the values of its input and twice its gradient."""

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden.shape[1]
        return num_tokens * hidden - (num_tokens - 1) * hidden.detach()


ALONE = "does not compute a token's logits from the last layer's output for it alone"


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Skips, f"{ALONE}, but reads a tensor that the part before the layers made"),
        (Convolves, ALONE),
        (CapsAll, ALONE),
        (ByLength, ALONE),
        (BiasedByPlace, ALONE),
        (ScalesGradient, ALONE),
        (DetachesAfter, "has logits without a gradient by the last layer's output"),
    ],
)
def test_what_does_not_work_token_by_token_is_refused(kind: type[CustomModel], what: str) -> None:
    saved = ["skip"] if kind in (Skips, Convolves, BiasedByPlace) else None
    model = built(kind, modules_to_save=saved)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "skip" in name or "gate" in name:
                parameter.zero_()
    assert_refused(model, what)


class ReadsBack(CustomModel):
    """Adds what a token some places before has, where there is one."""

    distance = 1

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        far = self.distance
        if hidden.shape[1] <= far:
            return hidden
        return hidden + 0.5 * nn.functional.pad(hidden[:, :-far], (0, 0, far, 0))


class ReadsAhead(CustomModel):
    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return (
            hidden + 1e-9 * nn.functional.pad(hidden[:, 30:], (0, 0, 0, 30))[:, : hidden.shape[1]]
        )


class InBlocks(CustomModel):
    """Adds the mean of each full block of 16 tokens to its last token, after the head."""

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        blocks = logits[:, : logits.shape[1] // 16 * 16].unflatten(1, (-1, 16))
        logits = logits.clone()
        logits[:, 15::16][:, : blocks.shape[1]] += blocks.mean(2)
        return logits


class OfOtherRows(CustomModel):
    """Adds what the row before has at the same place, where there are more than two rows."""

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, dims=0) if len(hidden) > 2 else hidden


class ScaledIfLong(CustomModel):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * (1 + (logits.shape[1] > 32))


class Back12(ReadsBack):
    distance = 12


class Back59(ReadsBack):
    distance = 59


def wide(num_rows: int, num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (num_rows, num_tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("kind", [Back12, Back59, ReadsAhead, InBlocks, OfOtherRows, ScaledIfLong])
def test_what_mixes_tokens_that_are_far_apart_is_refused(kind: type[CustomModel]) -> None:
    model = built(kind)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match=f"{ALONE}, in a trial of 192 tokens"):
        engine.forward_backward([wide(3, 60)])
    engine.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_longer_micro_batches_than_before_are_tried_again() -> None:
    model = built(Back12)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward([wide(1, 8)])
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(offload.UnsupportedModelError, match=ALONE):
        engine.forward_backward([wide(1, 8), wide(1, 13)])
    engine.detach()
    assert all(torch.equal(model.get_parameter(name).grad, x) for name, x in before.items())


def test_a_tail_that_mixes_more_tokens_than_a_row_has_is_refused_for_its_chunks() -> None:
    """Chunks hold the tokens of several rows; the model's own forward never has so many."""
    engine = offload.attach(built(Back59), num_slots=2, device="cpu", head_chunk_tokens=64)
    with pytest.raises(offload.UnsupportedModelError, match=ALONE):
        engine.forward_backward([wide(4, 20)])
    engine.detach()


def test_weights_that_are_zero_are_so_again_after_an_inspection() -> None:
    class Gated(CustomModel):
        def prepare(self) -> None:
            self.skip = nn.Linear(WIDTH, WIDTH, bias=False)

        def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return hidden + self.skip(hidden)

    model = built(Gated, modules_to_save=["skip"])
    trained = model.get_base_model().skip.modules_to_save["default"].weight
    with torch.no_grad():
        trained.zero_()
    assert_equal(model)
    assert not trained.any()


def test_a_cap_for_each_logit_is_exact() -> None:
    assert_equal(built(CapsEach))


def test_an_embedding_that_counts_is_refused() -> None:
    model = built(CustomModel)
    num_calls = 0

    def count(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return output * num_calls

    model.get_base_model().model.embed_tokens.register_forward_hook(count)
    assert_refused(model, "passes its layers other values when it is run again")


# A step of a model with the vocabulary of Qwen3; its head's gradient is a sum over all of it.
REAL_VOCABULARY = """
import sys, torch, offload
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
config = Qwen3Config(
    vocab_size=151_936, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=1, num_key_value_heads=1, head_dim=64,
)
model = Qwen3ForCausalLM(config).to(getattr(torch, sys.argv[1])).requires_grad_(False)
model.model.norm.requires_grad_(True)
ids = torch.randint(0, 151_936, (1, 16))
own = float(model(input_ids=ids, labels=ids, use_cache=False).loss)
engine = offload.attach(model, num_slots=2, device="cpu")
assert abs(engine.forward_backward([{"input_ids": ids, "labels": ids}]).loss - own) < 1e-2
"""


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_real_vocabulary_is_exact_on_a_processor_that_adds_one_after_the_other(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MKL's kernels, those for any processor have the largest rounding errors."""
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    run = subprocess.run(
        [sys.executable, "-c", REAL_VOCABULARY, dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


# ----------------------------------------------------------------------------------- own losses


class WithZLoss(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return 1e-4 * logits.float().logsumexp(-1).square().mean()


class AboveThreshold(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return (logits.abs() - 30).relu().mean()


class Smoothed(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return -1e-2 * logits.float().log_softmax(-1).mean()


class WithoutPadding(CustomModel):
    """Counts no token that is padding, wherever it is."""

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        kept = labels.masked_fill(labels == 2, -100)
        full, part = (
            self.loss_function(logits, those, vocab_size=VOCABULARY) for those in (labels, kept)
        )
        return part - full


class OfWeights(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        found = [p.square().sum() for n, p in self.named_parameters() if "lora_A" in n]
        return 1e-3 * torch.stack(found).sum() if found else 0.0


class OfTokens(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return 0.0 * self.tokens.sum()


class LeavesLoss(CustomLayer):
    """Leaves a loss on a part of it, as some routers do."""

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        self.mlp.balance = self.mlp(hidden).square().mean()
        return super().forward(hidden)


class Collects(CustomModel):
    layer = LeavesLoss

    def prepare(self) -> None:
        vars(self)["parts"] = [layer.mlp for layer in self.model.layers]

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return sum(part.balance for part in vars(self)["parts"])


class Searches(CustomModel):
    layer = LeavesLoss

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return sum(m.balance for m in self.modules() if hasattr(m, "balance"))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (WithZLoss, r"gives a loss of [\d.]+ where the mean of cross-entropies is [\d.]+"),
        (AboveThreshold, "changes the loss that its `loss_function` returns"),
        (Smoothed, r"gives a loss of [\d.]+ where"),
        (OfTokens, "reads a tensor that the part before the layers made"),
        (OfWeights, "reads the modules or parameters of a layer from outside"),
        (Collects, "but reads a tensor that layer 0 made"),
        (Searches, "reads the modules or parameters of a layer from outside"),
    ],
)
def test_a_loss_with_more_than_cross_entropy_is_refused(kind: type[CustomModel], what: str) -> None:
    assert_refused(built(kind), what)


def test_a_loss_that_leaves_out_padding_by_its_token_is_refused() -> None:
    model = built(WithoutPadding)
    model.config.pad_token_id = 2
    assert_refused(model, r"gives a loss of [\d.]+ where")


def next_tokens(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(rows, targets, **options)


class Weighted:
    """Weighs one class."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
        weight = torch.ones(logits.shape[-1])
        weight[61] = 5.0
        return next_tokens(logits, labels, weight=weight)


class Annealed:
    """Smooths labels from the twentieth call on."""

    calls = 0

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
        self.calls += 1
        return next_tokens(logits, labels, label_smoothing=0.1 if self.calls > 20 else 0.0)


def without_a_token(logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
    return next_tokens(logits, torch.where(labels == 61, -100, labels))


def copied(logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
    return next_tokens(logits, labels)


def test_a_loss_function_of_ones_own_is_refused_whatever_it_gives_on_a_few_tokens() -> None:
    own: dict[str, Any] = {
        "Weighted": Weighted(),
        "Annealed": Annealed(),
        "without_a_token": without_a_token,
        "copied": copied,
        "partial": partial(ForCausalLMLoss, ignore_index=-100),
    }
    for name, function in own.items():
        model = built(CustomModel)
        model.get_base_model().loss_function = function
        assert_refused(model, f"has a loss function of its own, `{name}`")


class InCode(CustomModel):
    """Computes the loss without `loss_function`."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            output.loss = next_tokens(output.logits, labels)
        return output


class PassesNumber(CustomModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            output.loss = self.loss_function(
                output.logits,
                labels,
                vocab_size=VOCABULARY,
                num_items_in_batch=(labels[:, 1:] != -100).sum(),
            )
        return output


class OtherLabels(CustomModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            kept = torch.where(labels == VOCABULARY, -100, labels)
            output.loss = self.loss_function(output.logits, kept, vocab_size=VOCABULARY)
        return output


class CapsForLoss(CustomModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            capped = output.logits.clamp(-1e3, 1e3)
            output.loss = self.loss_function(capped, labels, vocab_size=VOCABULARY)
        return output


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (InCode, "computes its loss by other code than its `loss_function`"),
        (PassesNumber, "passes `num_items_in_batch` to its `loss_function`"),
        (OtherLabels, "passes other labels to its `loss_function` than it is given"),
        (CapsForLoss, "passes other logits to its `loss_function` than it returns"),
    ],
)
def test_a_loss_that_is_transformers_own_in_part_only_is_refused(
    kind: type[CustomModel], what: str
) -> None:
    assert_refused(built(kind), what)


def test_a_loss_function_is_the_models_own_again_after_an_inspection() -> None:
    model = built(CustomModel)
    assert_equal(model)
    assert "_loss_function" not in vars(model.get_base_model())
    model = built(CustomModel)
    model.get_base_model().loss_function = ForCausalLMLoss
    assert_equal(model)
    assert vars(model.get_base_model())["_loss_function"] is ForCausalLMLoss


def test_a_hook_around_an_adapted_model_that_changes_its_loss_is_refused() -> None:
    model = built(CustomModel)

    def change(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if output.loss is not None:
            output.loss = output.loss * 1.001
        return output

    model.register_forward_hook(change)
    assert_refused(model, r"gives a loss of [\d.]+ where")


def test_a_small_extra_term_shows_in_16_bits_too() -> None:
    assert_refused(built(WithZLoss).bfloat16(), r"gives a loss of [\d.]+ where")


def qwen3(config: Any) -> Any:
    base = tiny_model("qwen3")
    return get_peft_model(base, config).train()


def test_the_regularisation_of_adalora_is_refused() -> None:
    config = AdaLoraConfig(
        target_modules=["q_proj"], total_step=10, init_r=4, target_r=2, task_type="CAUSAL_LM"
    )
    assert_refused(
        qwen3(config), "reads the modules or parameters of a layer from outside.*AdaLora"
    )


def test_invocation_tokens_of_an_adapter_are_refused() -> None:
    config = LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM"
    )
    assert_refused(qwen3(config), "reads the modules or parameters of a layer from outside")


def bart() -> Any:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=WIDTH,
            decoder_ffn_dim=WIDTH,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            dropout=0.0,
        )
    )


def bert() -> Any:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "match"),
    [
        (bart, "is an encoder with a decoder"),
        (bert, "compares each token's logits with the label in its own place"),
        (
            lambda: tiny_model("pegasus"),
            "compares each token's logits with the label in its own place",
        ),
    ],
)
def test_a_loss_that_is_not_shifted_is_refused(build: Callable[[], Any], match: str) -> None:
    model = build()
    names = ["q_proj"] if "Bert" not in type(model).__name__ else ["query"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=names)).train()
    assert_refused(adapted, match)


# ----------------------------------------------------------------------------------- gradient hooks


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
            engine.forward_backward(tiny_batches())
        assert all(p.grad is None for p in model.parameters())
        handle.remove()
        engine.forward_backward(tiny_batches())


def test_a_hook_on_a_gradient_that_two_layers_share_is_refused() -> None:
    model = trained_whole(is_tied=False)
    norm = model.model.layers[1].input_layernorm.weight
    model.model.layers[2].input_layernorm.weight = norm
    with attached(model) as engine:
        norm.register_hook(halved)
        with pytest.raises(offload.OffloadError, match=f"(?s)layernorm.* in exactly{HINT_AFTER}"):
            engine.forward_backward(tiny_batches())


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_hook_on_an_accumulated_gradient_is_refused(where: str) -> None:
    model = trained_whole(is_tied=False)
    with attached(model) as engine:
        model.get_parameter(where).register_post_accumulate_grad_hook(lambda p: None)
        what = f"{where} has a hook of `register_post_accumulate_grad_hook`"
        with pytest.raises(offload.OffloadError, match=f"(?s){what}{HINT_AFTER}"):
            engine.forward_backward(tiny_batches())
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
        engine.forward_backward(tiny_batches())
    assert counts.num_calls > len(tiny_batches())


def test_a_hook_on_a_master_is_refused_for_it_would_not_run() -> None:
    model: Any = MODELS["qwen3"]().train()
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    name = "model.layers.1.mlp.up_proj.weight"
    handle = engine.trained_parameters[name].register_hook(halved)
    with pytest.raises(offload.OffloadError, match=f"(?s){name}, as .* a hook;{HINT_AFTER}"):
        engine.forward_backward(tiny_batches())
    assert all(p.grad is None for p in engine.trained_parameters.values())
    handle.remove()
    engine.forward_backward(tiny_batches())
    engine.detach()


@pytest.mark.thorough
def test_a_hook_on_a_gradient_inside_a_layer_runs_as_in_the_plain_model() -> None:
    """The sum of what it made of each micro-batch: `plain` runs a copy, which has no hooks."""
    model = tiny("qwen3")
    batches = tiny_batches()
    num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for parameter in (p for n, p in model.named_parameters() if "layers.1." in n):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=torch.tensor(num_labels)).loss.backward()
    expected = given_gradients(model)
    model.zero_grad()
    with attached(model) as engine:
        engine.forward_backward(tiny_batches())
        found = given_gradients(model)
    assert max(g.abs().max() for n, g in expected.items() if "layers.1." in n) <= 3.001e-3
    assert max(g.abs().max() for n, g in expected.items() if "layers.2." in n) > 4e-3
    assert all(torch.allclose(found[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())


# --------------------------------------------------------------------------------------- randomness


Found = tuple[float, dict[str, torch.Tensor]]
INSPECTED = 3  # calls of each layer before the first step


class Noise(nn.Module):
    """Adds noise by an operation that takes no generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, out=torch.empty(x.shape))


def gpt2(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    )
    config._attn_implementation = attention
    assert config.attn_pdrop > 0
    model = GPT2LMHeadModel(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name)
    return model


RANDOMNESS_MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout of adapters": lambda: tiny("qwen3", dropout=0.5),
    "dropout in attention, eager": lambda: gpt2("eager"),
    "dropout in attention, sdpa": lambda: gpt2("sdpa"),
}


def draw_elsewhere() -> None:
    """Draw from torch's default generator on another thread, and wait for it."""
    thread = threading.Thread(target=lambda: torch.rand(3))
    thread.start()
    thread.join()


def disturb(model: nn.Module, calls: Sequence[int]) -> list[int]:
    """Let another thread draw at these visits of each layer, before its first module computes.

    Returns:
        How many visits each layer had; more as it has more.
    """
    counts = []
    for number, layer in enumerate(LayeredModel(model).layers):
        counts.append(-INSPECTED)

        def before(_module: nn.Module, _inputs: object, number: int = number) -> None:
            counts[number] += 1
            if counts[number] in calls:
                draw_elsewhere()

        next(layer.children()).register_forward_pre_hook(before)
    return counts


def step(model: nn.Module, *, kept_graphs: int = 0) -> Found:
    engine = offload.attach(model, num_slots=2, device="cpu", kept_graphs=kept_graphs)
    try:
        loss = engine.forward_backward(tiny_batches()[:1], dropout_seed=0).loss
        return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    finally:
        engine.detach()


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in found[1])


@pytest.mark.thorough
@pytest.mark.parametrize("model", mostly_slow(RANDOMNESS_MODELS, "dropout in attention, sdpa"))
@pytest.mark.parametrize("calls", [(1,), (2,)], ids=["forward", "recompute"])
def test_move_dropout_is_the_same_while_another_thread_draws(
    model: Callable[[], nn.Module], calls: Sequence[int]
) -> None:
    expected = step(model())
    disturbed = model()
    counts = disturb(disturbed, calls)
    assert_same(step(disturbed), expected)
    assert set(counts) == {2}, "visits must pass the point at which the thread draws"


@pytest.mark.thorough
def test_move_the_recompute_repeats_the_dropout_of_a_kept_graph() -> None:
    again = step(tiny("qwen3", dropout=0.5))
    assert_same(step(tiny("qwen3", dropout=0.5), kept_graphs=NUM_TINY_LAYERS), again)


@pytest.fixture
def noisy() -> nn.Module:
    model: Any = tiny("qwen3")
    layers: Any = LayeredModel(model).layers
    for layer in layers:
        layer.mlp = nn.Sequential(Noise(), layer.mlp)
    return model


@pytest.mark.thorough
def test_noise_from_the_default_generator_is_repeated(noisy: nn.Module) -> None:
    plain = copy.deepcopy(noisy)
    assert_same(step(noisy), step(plain, kept_graphs=NUM_TINY_LAYERS))


@pytest.mark.thorough
@pytest.mark.parametrize("call", [1, 2], ids=["forward", "recompute"])
def test_noise_that_another_thread_changes_is_refused(noisy: nn.Module, call: int) -> None:
    disturb(noisy, (call,))
    layers = LayeredModel(noisy).layers
    with pytest.raises(
        offload.OffloadError,
        match=rf"layer {len(layers) - 1} drew other random numbers in its recompute"
        r" than in its forward;[\s\S]*hint: give the other thread a `torch.Generator` of its own",
    ):
        step(noisy)
    assert all(p.grad is None for p in layers.parameters())


@pytest.mark.thorough
def test_move_layers_that_draw_nothing_do_not_mind_threads_that_draw() -> None:
    expected = step(tiny("qwen3"))
    model = tiny("qwen3")
    counts = disturb(model, range(1, 100))
    assert_same(step(model), expected)
    assert set(counts) == {3}, "computed again once, then kept apart from the default generator"
    model.zero_grad()
    assert_same(step(model), expected)


def test_layers_that_draw_nothing_are_seen_by_no_mode_after_their_first_visit() -> None:
    modes = []
    model = tiny("qwen3")
    first = LayeredModel(model).layers[0]

    def note(*_: object) -> None:
        modes.append(torch._C._len_torch_dispatch_stack())

    first.register_forward_pre_hook(note)
    step(model)
    assert modes[INSPECTED:] == [1, 0]


@pytest.fixture
def generators() -> Iterator[dict[str, torch.Generator]]:
    before = torch.default_generator.get_state()
    yield {"cpu": torch.Generator().manual_seed(0)}
    assert torch.equal(before, torch.default_generator.get_state()), "the default one has moved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_cudas_fused_dropout_is_masked_scaled_and_differentiated(
    p: float, dtype: torch.dtype, generators: dict[str, torch.Generator]
) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with _OwnGenerators(generators) as mode:
        out, mask = torch.native_dropout(x, p, True)
    out.sum().backward()
    scale = 1 / (1 - p) if p < 1 else 0.0
    assert mode.has_drawn
    assert not mode.has_drawn_elsewhere
    assert mask.dtype is torch.bool
    assert float(mask.float().mean()) == pytest.approx(1 - p, abs=0.03)
    assert torch.equal(out, (x.float() * mask * scale).to(dtype))
    assert x.grad is not None
    assert torch.equal(x.grad, (mask * scale).to(dtype))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(3),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: torch.randint(5, (3,)),
        lambda x: torch.randint(2, 5, (3,)),
        lambda x: torch.randperm(4),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.empty(3).uniform_(),
        lambda x: torch.empty(3).random_(),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.multinomial(x[0].sigmoid(), 2),
        lambda x: nn.functional.dropout(x),
        lambda x: nn.functional.alpha_dropout(x, training=True),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_what_torch_draws_comes_from_a_generator_of_our_own(
    draw: Callable[[torch.Tensor], torch.Tensor], generators: dict[str, torch.Generator]
) -> None:
    x = torch.zeros(1, 4, 4)
    with _OwnGenerators(generators) as mode:
        draw(x)
    assert mode.has_drawn
    assert not mode.has_drawn_elsewhere


@torch.library.custom_op("sluice_tests::attend", mutates_args=())
def attend(x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    """Stand for the attention of another package, whose operation has no tag."""
    return x.clone()


def test_other_packages_attention_draws_where_it_has_dropout() -> None:
    for dropout_p in (0.0, 0.5):
        with _OwnGenerators({"cpu": torch.Generator()}) as mode:
            attend(torch.zeros(1), dropout_p=dropout_p)
        assert mode.has_drawn == mode.has_drawn_elsewhere == (dropout_p > 0)


def test_attention_without_dropout_draws_nothing(generators: dict[str, torch.Generator]) -> None:
    x = torch.zeros(1, 2, 4, 4)
    with _OwnGenerators(generators) as mode:
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert not mode.has_drawn


@pytest.mark.slow
def test_the_page_of_what_catches_what_is_current(tmp_path: Path) -> None:
    root, found = Path(__file__).parents[2], tmp_path / "page.md"
    command = [sys.executable, "-m", "tests.parity.caught", "--write", str(found)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    assert found.read_text() == (root / "docs" / "development" / "refusals.md").read_text()
